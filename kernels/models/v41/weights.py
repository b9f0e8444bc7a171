"""What of a V4.1 language model is in memory: layers, head, the drafter's window part, and rotary positions?"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import V41Config
from kernels.models.v41.draft_window import DraftWindows
from kernels.models.v41.engram import tables_of
from kernels.models.v41.head import Head
from kernels.models.v41.layer import Layer
from kernels.models.v41.matrices import Packer, Source
from kernels.models.v41.step import Ropes
from kernels.ops import sparse
from kernels.ops.linear import Kernel
from kernels.ops.numerics import Numerics
from kernels.ops.rope import RopeTable, plain_frequencies, yarn_frequencies
from kernels.ops.row_tiles import NotInvariant


class V41Weights:
    """Every weight, dequantised and packed for one kernel; n-gram tables stay in their files."""

    def __init__(
        self,
        config: V41Config,
        checkpoint: Checkpoint,
        compressed_ids: Tensor,
        numerics: Numerics,
        kernel: Kernel,
        device: torch.device,
    ) -> None:
        """compressed_ids: [tokenizer's vocabulary] int64.  Raises NotInvariant."""
        self.config, self.numerics, self.device = config, numerics, device
        # Ids from vocab_size on name images, whatever a tokenizer may have there.
        self.compressed_ids = compressed_ids[: config.vocab_size].to(device)
        self.ropes = ropes_of(config, device)
        self._attention_bits = _prove_attention(config, device)
        self.packer = Packer(kernel, device)
        model = Source(checkpoint, self.packer, "")
        tables = tables_of(config.engram)
        self.embedding = model.tensor("embed.weight")
        self.layers = [
            Layer(config, model.within(f"layers.{layer}"), numerics, layer=layer, tables=tables.get(layer))
            for layer in range(config.num_layers)
        ]
        self.head = Head(config, model, numerics)
        self.draft_windows = DraftWindows(config, model.within("mtp"), numerics) if config.drafter.num_layers else None

    def numeric_recipe(self) -> str:
        """Everything that decides a bit, and a hash of what the products and the attention give here."""
        bits = hashlib.sha256(self.packer.probe() + self._attention_bits).hexdigest()[:16]
        return (
            f"numerics={self.numerics.name} kernel={self.packer.names} attention=fp32x{sparse.TOKENS}"
            f" device={self.device.type} torch={torch.__version__} bits={bits}"
        )


def ropes_of(config: V41Config, device: torch.device) -> Ropes:
    yarn, dims = config.compress_rope, config.rope_dims
    compressed = yarn_frequencies(
        dims,
        theta=yarn.theta,
        factor=yarn.factor,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        original_tokens=yarn.original_max_position_tokens,
    )
    return Ropes(RopeTable(plain_frequencies(dims, config.rope_theta), device), RopeTable(compressed, device))


def _prove_attention(config: V41Config, device: torch.device) -> bytes:
    """What this machine's attention computes, for both lengths of key lists.  Raises NotInvariant."""
    bits = b""
    for length in (config.window_tokens, config.window_tokens + config.index_topk):
        same, seen = sparse.prove(heads=config.num_heads, size=config.head_dim, length=length, device=device)
        if not same:
            raise NotInvariant(f"attention over {length} keys depends on a token's slot on {device}")
        bits += seen
    return bits
