"""What is in a V4.1 checkpoint folder: is it whole, and what are its tensors in fp32?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.models.digest import Progress
from kernels.models.v41.config import V41Config
from kernels.models.v41.stored import Stored, return_freed_memory, stored_tensors
from kernels.models.v41.tensors import E4M3, FP4, Spec, expected_tensors, is_engram_table, is_vision
from kernels.models.weights import BadWeights, SafetensorsWeights, open_weights
from kernels.ops.quant import dequantise_fp4_weight, dequantise_fp8_rows, dequantise_fp8_weight

Part = Literal["language", "vision"]
_PREFIX = "model."
_DIGEST_TAG = b"fathom.v41.weights.1"
_TRIMS = 64
"""How often freed memory is returned while everything is read: what waits for it stays below the 64th part."""


class Checkpoint:
    """An open checkpoint, all of whose tensors have the names, shapes and formats its config asks for.

    Tensors are read one by one and dequantised on the way, so that loading needs little more memory than what stays.
    """

    def __init__(
        self, model_dir: Path, config: V41Config, progress: Progress | None = None, *, part: Part = "language"
    ) -> None:
        """Check the headers.  part: what `progress` ("load weights", bytes read, bytes in all) counts as all.

        BadWeights lists everything that is missing, too much, or of another shape or format.
        """
        self.config = config
        weights = open_weights(model_dir, progress)
        if not isinstance(weights, SafetensorsWeights):
            raise BadWeights(model_dir, ["it is a GGUF file; V4.1 is read from safetensors"])
        self._weights = weights
        self._stored = _checked(model_dir, weights, expected_tensors(config))
        self._progress, self._read_bytes = progress, 0
        self._tables: dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}
        self.total_bytes = sum(
            stored.num_bytes
            for name, stored in self._stored.items()
            if is_vision(name) == (part == "vision") and not is_engram_table(name)
        )

    def dense(self, name: str) -> Tensor:
        """A whole tensor, fp32, in its own memory; fp8 and fp4 ones dequantised. Name without `model.`.

        KeyError for a name the config does not ask for; ValueError for an n-gram table.
        """
        if is_engram_table(name):
            raise ValueError(f"{name} is gathered by row, never read as a whole")
        weight = self._read(name)
        if weight.dtype == E4M3:
            return dequantise_fp8_weight(weight, self._read(_scale_of(name)))
        if weight.dtype == FP4:
            return dequantise_fp4_weight(weight, self._read(_scale_of(name)))
        return weight.float()

    def stored(self, name: str) -> Tensor:
        """A whole tensor in the format the file has it in, in its own memory.

        KeyError for a name the config does not ask for; ValueError for an n-gram table.
        """
        if is_engram_table(name):
            raise ValueError(f"{name} is gathered by row, never read as a whole")
        return self._read(name)

    def expert(self, layer_prefix: str, expert: int, part: Literal["w1", "w2", "w3"]) -> Tensor:
        """One matrix of a routed expert, fp32 [out, in].  layer_prefix: "layers.3" or "mtp.0", dot or not."""
        return self.dense(f"{layer_prefix.removesuffix('.')}.ffn.experts.{expert}.{part}.weight")

    def engram_rows(self, layer: int, rows: Tensor) -> Tensor:
        """Rows of a layer's n-gram table, read from the map: [...] int64 -> [..., head_dim] fp32.

        IndexError for a row that is not there.
        """
        data, scales = self.table(layer)
        wanted = rows.reshape(-1).cpu().numpy()
        if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(data):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of a table of {len(data)} rows (layer {layer})")
        weight, scale = torch.from_numpy(data[wanted]), torch.from_numpy(scales[wanted])
        values = dequantise_fp8_rows(weight.view(E4M3), scale.view(torch.float8_e8m0fnu))
        return values.view(*rows.shape, data.shape[1]).to(rows.device)

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) that names the weights and what config.json and tokenizer.json make of them.

        The tokenizer counts: n-gram tables are addressed by its spellings.
        """
        tokenizer = self._weights.path / "tokenizer.json"
        whole = hashlib.sha256(_DIGEST_TAG + self._weights.digest() + repr(self.config).encode())
        whole.update(hashlib.sha256(tokenizer.read_bytes() if tokenizer.is_file() else b"").digest())
        return whole.digest()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every tensor's bare name, sorted."""
        return tuple(sorted(self._stored))

    def _read(self, name: str) -> Tensor:
        stored = self._stored[name]
        tensor = stored.read()
        before, self._read_bytes = self._read_bytes, self._read_bytes + stored.num_bytes
        if before * _TRIMS // self.total_bytes != self._read_bytes * _TRIMS // self.total_bytes:
            return_freed_memory()
        if self._progress:
            self._progress("load weights", min(self._read_bytes, self.total_bytes), self.total_bytes)
        return tensor

    def table(self, layer: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """A layer's n-gram table, mapped: e4m3 bits [rows, head_dim], scale exponents [rows, head_dim / 32]."""
        if layer not in self._tables:
            prefix = f"layers.{layer}.engram.embed"
            self._tables[layer] = (self._stored[f"{prefix}.weight"].mapped(), self._stored[f"{prefix}.scale"].mapped())
        return self._tables[layer]


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('weight')}scale"


def _checked(model_dir: Path, weights: SafetensorsWeights, expected: Mapping[str, Spec]) -> dict[str, Stored]:
    """Bare name -> where it lies, for exactly the expected tensors; one BadWeights for everything else."""
    problems: list[str] = []
    stored: dict[str, Stored] = {}
    for file in weights.files:
        try:
            listed = stored_tensors(file)
        except ValueError as error:
            problems.append(str(error))
            continue
        for full_name, tensor in listed.items():
            name = full_name.removeprefix(_PREFIX)
            if name in stored:
                problems.append(f"tensor {name} is there twice")
            stored[name] = tensor
    for name, spec in expected.items():
        if name not in stored:
            problems.append(f"tensor {name} is missing")
        elif stored[name].shape != spec.shape:
            problems.append(
                f"tensor {name} has shape {list(stored[name].shape)}, the config asks for {list(spec.shape)}"
            )
        elif not spec.accepts(stored[name].dtype):
            problems.append(f"tensor {name} is {_short(stored[name].dtype)}, expected {_short(spec.dtype)}")
    problems += [f"tensor {name} is unknown to this config" for name in stored if name not in expected]
    if problems:
        raise BadWeights(model_dir, problems)
    return stored


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
