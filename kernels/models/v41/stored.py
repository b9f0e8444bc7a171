"""Where in its file does a tensor lie, and how is it read without keeping the file's pages in memory?

A tensor read through a memory map stays in the process's memory beside its fp32 copy. Tensors that become fp32 are
therefore read into a buffer of their own, which is freed at once; only n-gram tables are mapped, for a few rows each.
What is freed between tensors that stay is given back to the system by `return_freed_memory`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "U8": torch.uint8, "I64": torch.int64, "I32": torch.int32,
}  # fmt: skip
"""safetensors' names of formats."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in one safetensors file."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """A copy of its own, in the dtype it is stored in. OSError when the file is shorter than it was."""
        data = np.fromfile(self.file, dtype=np.uint8, count=self.num_bytes, offset=self.offset)
        if len(data) != self.num_bytes:
            raise OSError(f"{self.file} is shorter than its header says")
        return torch.from_numpy(data).view(self.dtype).view(self.shape)

    def mapped(self) -> NDArray[np.uint8]:
        """Its rows as bytes, [rows, bytes of a row], read from the file as they are touched."""
        with self.file.open("rb") as stream:
            whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        whole.madvise(mmap.MADV_RANDOM)  # a row is far from the next one: reading ahead is wasted
        flat = np.frombuffer(whole, dtype=np.uint8, count=self.num_bytes, offset=self.offset)
        return flat.reshape(self.shape[0], -1)


def stored_tensors(file: Path) -> dict[str, Stored]:
    """What a safetensors file's header lists. The file was opened by safetensors before, which checks its header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    unknown = sorted({entry["dtype"] for entry in header.values()} - set(DTYPES))
    if unknown:
        raise ValueError(f"{file.name} holds tensors in {', '.join(unknown)}")
    return {
        name: Stored(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), DTYPES[entry["dtype"]])
        for name, entry in header.items()
    }


def return_freed_memory() -> None:
    """Give the free pages between what is in use back to the system; does nothing without glibc.

    glibc rarely fits a new aligned block into the gap an earlier one left (measured: a third more memory than tensors
    after dequantising a few thousand small ones).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
