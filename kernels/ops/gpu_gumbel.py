"""How does a GPU make the noise of gumbel.py? The same integers bit for bit, then the same fp64 formula."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops import gpu_launch  # noqa: F401 - it turns Triton to the interpreter where there is no GPU

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
TOKEN_FACTOR = tl.constexpr(0xD1B54A32D192ED03)
MIX_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def hash_steps(key: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """The upper 24 bits of each token's hash.  key: uint64 scalar.  tokens: int block.  Returns a uint64 block."""
    x = (tokens.to(tl.uint64) + 1) * TOKEN_FACTOR
    x = (x ^ key) + GOLDEN
    x = (x ^ (x >> 30)) * MIX_FIRST
    x = (x ^ (x >> 27)) * MIX_SECOND
    x = x ^ (x >> 31)
    return x >> 40


@triton.jit
def gumbel(steps: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of hash steps: fp64."""
    return -tl.log(-tl.log((steps.to(tl.float64) + 0.5) * 5.9604644775390625e-08))


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """fp32 -> int64 numbers in the same order; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
