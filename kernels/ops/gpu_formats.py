"""How does a kernel read and write the fp8 and fp4 formats, value by value?

Device functions that kernels of other files call; bit for bit the formats of `kernels.ops.quant`. Values travel in fp32
and are rounded to bf16 by name, because Triton's interpreter casts to bf16 and multiplies bf16 matrices wrongly.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.gpu_launch import INTERPRETED

IN_PYTHON = tl.constexpr(INTERPRETED)
FP8_FLOOR = tl.constexpr(1e-4)
INDEX_FLOOR = tl.constexpr(6 * 2.0**-126)
MAIN_FLOOR = tl.constexpr(6 * 2.0**-9)
SIXTH = tl.constexpr(0.1666666716337204)
"""The fp32 value next to 1/6."""


@triton.jit
def bf16(x: tl.tensor) -> tl.tensor:
    """X rounded to bf16, nearest and ties to even; still fp32."""
    if IN_PYTHON:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """Acc + a @ b of bf16 values, summed in fp32."""
    if IN_PYTHON:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)


@triton.jit
def low_bf16(pairs: tl.tensor) -> tl.tensor:
    """The even ones of bf16 values that were loaded two in an int32, as fp32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_bf16(pairs: tl.tensor) -> tl.tensor:
    """The odd ones."""
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def bf16_pairs(even: tl.tensor, odd: tl.tensor) -> tl.tensor:
    """Two in an int32 again; both are bf16 values in fp32."""
    low = even.to(tl.uint32, bitcast=True) >> 16
    high = odd.to(tl.uint32, bitcast=True) & 0xFFFF0000
    return (low | high).to(tl.int32, bitcast=True)


@triton.jit
def exponents(largest: tl.tensor, FLOOR: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Biased exponent of the least power of two that brings a group's largest value within LIMIT, int32."""
    ratio = tl.div_rn(tl.maximum(largest, FLOOR), tl.full(largest.shape, LIMIT, tl.float32))
    return (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def power(exponent: tl.tensor) -> tl.tensor:
    """2 to the unbiased exponent; 0 stands for zero."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_bits(x: tl.tensor) -> tl.tensor:
    """Nearest e4m3 of fp32 values within 448 (or a rounding beyond), ties to even: uint8."""
    if IN_PYTHON:
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Adding 1.5 * 2^23 leaves the nearest whole number of steps of 2^-9 in the low bits.
        steps = (magnitude * 512.0 + 12582912.0).to(tl.uint32, bitcast=True) & 15
        code = tl.where(magnitude < 0.015625, steps, tl.minimum(normal, 0x7E))
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        return (code | sign).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(bits: tl.tensor) -> tl.tensor:
    """uint8 (or wider) e4m3 bits -> fp32. NaN is not a value of any record."""
    wide = bits.to(tl.uint32)
    small = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
    return small * 1.329227995784916e36  # 2^120: the biases differ by 120


@triton.jit
def e2m1_code(x: tl.tensor) -> tl.tensor:
    """Nibble of the nearest e2m1, ties to the even code, beyond 6 saturated: int32."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(nibble: tl.tensor) -> tl.tensor:
    """int32 nibbles (higher bits are ignored) -> fp32."""
    wide = nibble.to(tl.uint32)
    small = (((wide & 7) << 22) | ((wide & 8) << 28)).to(tl.float32, bitcast=True)
    return small * 8.507059173023462e37  # 2^126


@triton.jit
def fp8_exponent(largest: tl.tensor) -> tl.tensor:
    """Biased exponent of an fp8 group's scale, int32."""
    return exponents(largest, FP8_FLOOR, 448.0)


@triton.jit
def fp8_value(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """X as e4m3 under a power of two holds it; both fp32 of one shape."""
    # Dividing by a power of two is exact, and so is multiplying again.
    return e4m3_value(e4m3_bits(tl.div_rn(x, scale))) * scale


@triton.jit
def fp8_round_trip(x: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """[rows, GROUPS * 32] fp32 -> what their fp8 record holds, fp32."""
    groups = tl.reshape(x, (x.shape[0], GROUPS, 32))
    exponent = fp8_exponent(tl.max(tl.abs(groups), axis=2))[:, :, None]
    # Multiplying by a power of two's inverse is as exact as dividing, and several times as fast.
    bits = e4m3_bits(groups * tl.broadcast_to(power(254 - exponent), groups.shape))
    return tl.reshape(e4m3_value(bits) * tl.broadcast_to(power(exponent), groups.shape), x.shape)


@triton.jit
def e2m1_pairs(both: tl.tensor, low_scale: tl.tensor, high_scale: tl.tensor) -> tl.tensor:
    """The low and the high nibbles of bytes, each times a scale: two bf16 tensors like them.

    Scales are fp32, broadcast already, with so few bits that products are bf16 values.
    """
    if IN_PYTHON:
        low = (e2m1_value(both) * low_scale).to(tl.bfloat16)
        high = (e2m1_value(both >> 4) * high_scale).to(tl.bfloat16)
    else:
        # Two at a time: a nibble's bits under a bf16's exponent are its value times 2^-126.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, k;
            mov.b32 k, 0x7E807E80;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 c, a, 12;
            and.b32 c, c, 0x80008000;
            shl.b32 d, a, 6;
            lop3.b32 c, d, 0x01C001C0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $0, c, $5;
            shl.b32 c, b, 12;
            and.b32 c, c, 0x80008000;
            shl.b32 d, b, 6;
            lop3.b32 c, d, 0x01C001C0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $1, c, $6;
            shl.b32 c, a, 8;
            and.b32 c, c, 0x80008000;
            shl.b32 d, a, 2;
            lop3.b32 c, d, 0x01C001C0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $2, c, $7;
            shl.b32 c, b, 8;
            and.b32 c, c, 0x80008000;
            shl.b32 d, b, 2;
            lop3.b32 c, d, 0x01C001C0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $3, c, $8;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [both.to(tl.uint8), low_scale.to(tl.bfloat16), high_scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def e4m3_pairs(both: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The low and the high bytes of uint16, e4m3 each, times a scale: two bf16 tensors like them; scale as above."""
    if IN_PYTHON:
        wide = both.to(tl.uint32)
        low = (e4m3_value(wide & 0xFF) * scale).to(tl.bfloat16)
        high = (e4m3_value(wide >> 8) * scale).to(tl.bfloat16)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 c, d, k;
            mov.b32 k, 0x7B807B80;
            shl.b32 c, $2, 8;
            and.b32 c, c, 0x80008000;
            shl.b32 d, $2, 4;
            lop3.b32 c, d, 0x07F007F0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $0, c, $3;
            and.b32 c, $2, 0x80008000;
            shr.b32 d, $2, 4;
            lop3.b32 c, d, 0x07F007F0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $1, c, $3;
            }
            """,
            "=&r,=&r,r,r",
            [both.to(tl.uint16), scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def e4m3_scaled(bits: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """e4m3 bits (uint8) times a scale, bf16; scale as above."""
    if IN_PYTHON:
        values = (e4m3_value(bits) * scale).to(tl.bfloat16)
    else:
        values = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, k;
            mov.b32 k, 0x7B807B80;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            shl.b32 c, a, 8;
            and.b32 c, c, 0x80008000;
            shl.b32 d, a, 4;
            lop3.b32 c, d, 0x07F007F0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $0, c, $3;
            shl.b32 c, b, 8;
            and.b32 c, c, 0x80008000;
            shl.b32 d, b, 4;
            lop3.b32 c, d, 0x07F007F0, c, 0xEA;
            mul.rn.bf16x2 c, c, k;
            mul.rn.bf16x2 $1, c, $4;
            }
            """,
            "=&r,=&r,r,r,r",
            [bits.to(tl.uint8), scale.to(tl.bfloat16)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return values
