"""What does a layer with n-gram memory add to a token's streams?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.models.config import ModelNotSupported
from kernels.models.v41.config import EngramConfig
from kernels.models.v41.matrices import product
from kernels.models.v41.spellings import token_spellings
from kernels.ops.engram import HashTables, compress_vocabulary, gate, hash_tables, table_rows
from kernels.ops.hyper import STREAMS
from kernels.ops.numerics import Numerics
from kernels.ops.row_tiles import TiledLinear

Gather = Callable[[Tensor], Tensor]
"""Rows of the layer's table, [tokens, rows] int64 -> [tokens, rows, head_dim] fp32 on the same device."""


def read_compressed_ids(model_dir: Path, config: EngramConfig) -> Tensor:
    """Token id -> compressed id, [vocabulary] int64, from the folder's tokenizer.json.

    Raises ModelNotSupported when there is none, or it is not the vocabulary that the tables were trained with.
    """
    path = model_dir / "tokenizer.json"
    compressed = compress_vocabulary(token_spellings(path))
    found = int(compressed.max()) + 1
    if found != config.compressed_vocab:
        raise ModelNotSupported(
            f"{path}: its tokens read in {found} different ways, config.json's engram_compressed_vocab_size is"
            f" {config.compressed_vocab}; the n-gram tables belong to another tokenizer"
        )
    return compressed


def tables_of(config: EngramConfig) -> dict[int, HashTables]:
    """Every n-gram layer's hash tables.  Raises ModelNotSupported when the config counts other rows."""
    tables = hash_tables(
        config.layers,
        vocab_size=config.table_vocab,
        heads=config.num_heads,
        max_ngram=config.max_ngram,
        compressed_vocab_size=config.compressed_vocab,
    )
    counted = tuple(tables[layer].num_rows for layer in config.layers)
    if counted != config.num_rows:
        raise ModelNotSupported(f"engram_num_embeddings is {list(config.num_rows)}; the primes make {list(counted)}")
    return tables


class Engram:
    """One layer's n-gram memory."""

    def __init__(
        self,
        numerics: Numerics,
        *,
        tables: HashTables,
        gather: Gather,
        wkv: TiledLinear,
        query_weight: Tensor,
        key_weight: Tensor,
        eps: float,
    ) -> None:
        """wkv: [rows * head_dim] -> [5 * hidden], four keys and a value.  query_weight, key_weight: [4, hidden]."""
        self._numerics, self._tables, self._gather, self._eps = numerics, tables, gather, eps
        self.wkv = wkv
        self._weight = query_weight.float() * key_weight.float()

    def __call__(self, streams: Tensor, windows: Tensor, is_image: Tensor | None) -> Tensor:
        """The streams with the memory added: [rows, 4, hidden] fp32, new; image tokens and padding as they were.

        streams: [rows, 4, hidden] fp32, the step's tokens first, then padding.  windows: [tokens, max_ngram] compressed
        ids.  is_image: [tokens] bool; None = none.
        """
        count = len(windows)
        own = streams[:count]
        keys, value = self._read(windows)
        opened = gate(own, keys, weight=self._weight, eps=self._eps)
        added = self._numerics.bf16(own + opened.unsqueeze(-1) * value)
        if is_image is not None:
            added = torch.where(is_image[:, None, None], own, added)
        return torch.cat([added, streams[count:]]) if count < len(streams) else added

    def gates(self, streams: Tensor, windows: Tensor) -> Tensor:
        """How far each stream of each token opens: [tokens, 4] fp32."""
        return gate(streams, self._read(windows)[0], weight=self._weight, eps=self._eps)

    def _read(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [tokens, 4, hidden] and values [tokens, 1, hidden] of the windows."""
        # The rows are fp8 values as they are stored: quantising them again would change nothing.
        embeddings = self._gather(table_rows(windows, self._tables)).flatten(1)
        read = self._numerics.bf16(product(self.wkv, embeddings)).view(len(windows), STREAMS + 1, -1)
        # Their lengths are summed: a row's bits are only promised where rows lie end to end.
        return read[:, :STREAMS].contiguous(), read[:, STREAMS:]
