"""Where are values rounded on their way through V4.1?

One code path runs in three ways: without any rounding, with the real cache records, and with every rounding of the
production formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kernels.ops.quant import Codec, Fp32Record, IndexFp4, MainFp4, WindowFp8, fp8_round_trip


@dataclass(frozen=True, slots=True)
class Numerics:
    """One of EXACT, KVQ and QUANT."""

    name: Literal["exact", "kvq", "quant"]

    def bf16(self, x: Tensor) -> Tensor:
        """A tensor that production keeps in bf16: fp32 like x, or x itself."""
        return x.bfloat16().float() if self.name == "quant" else x

    def fp8(self, x: Tensor) -> Tensor:
        """The rows of an fp8 or fp4 matrix product: [..., multiple of 32] fp32 like x, or x itself."""
        return fp8_round_trip(x) if self.name == "quant" else x

    def index_query(self, x: Tensor) -> Tensor:
        """Index queries, which meet the index records in the records' own format: [..., index dim] fp32 like x."""
        if self.name == "exact":
            return x
        codec, rows = IndexFp4(x.shape[-1]), x.reshape(-1, x.shape[-1])
        return codec.decode(codec.encode(rows)).view(x.shape)

    def window(self, dim: int) -> Codec:
        """The record of a token in a sliding window."""
        return Fp32Record(dim) if self.name == "exact" else WindowFp8(dim)

    def main(self, dim: int) -> Codec:
        """The record of a compressed entry that attention reads."""
        return Fp32Record(dim) if self.name == "exact" else MainFp4(dim)

    def index(self, dim: int) -> Codec:
        """The record of a compressed entry's index key."""
        return Fp32Record(dim) if self.name == "exact" else IndexFp4(dim)


EXACT = Numerics("exact")
"""Nothing is rounded, cache records are fp32. For tests."""
KVQ = Numerics("kvq")
"""Exact arithmetic on the real cache records: the setting fp32."""
QUANT = Numerics("quant")
"""Production: the real records, fp8 before matrix products, bf16 between them: the setting bf16."""
