"""How do packed four- and eight-bit values become bf16 or e4m3 in a kernel in Gluon?

As in `kernels.ops.gpu_formats`, several at a time: bits under a bf16's exponent are the value times a power of two, and
a table of eight bytes is looked up by nibbles.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def e2m1_pairs(four: gl.tensor, scale: gl.tensor) -> gl.tuple:
    """Four bytes, eight e2m1, times a scale: the low nibbles of bytes 0, 1 and 2, 3, then the high ones.

    scale: 2 ** 126 times as large, in which the format's own power is. Two bf16 in an int32 everywhere: bytes that pass
    from turn to turn would take a register each.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, 0, 0x1404;
        prmt.b32 b, $4, 0, 0x3424;
        shl.b32 c, a, 4;
        and.b32 c, c, 0x80008000;
        shr.u32 d, a, 2;
        lop3.b32 c, d, 0x01C001C0, c, 0xEA;
        mul.rn.bf16x2 $0, c, $5;
        shl.b32 c, b, 4;
        and.b32 c, c, 0x80008000;
        shr.u32 d, b, 2;
        lop3.b32 c, d, 0x01C001C0, c, 0xEA;
        mul.rn.bf16x2 $1, c, $5;
        and.b32 c, a, 0x80008000;
        shr.u32 d, a, 6;
        lop3.b32 c, d, 0x01C001C0, c, 0xEA;
        mul.rn.bf16x2 $2, c, $5;
        and.b32 c, b, 0x80008000;
        shr.u32 d, b, 6;
        lop3.b32 c, d, 0x01C001C0, c, 0xEA;
        mul.rn.bf16x2 $3, c, $5;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [four, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def e4m3_pairs(four: gl.tensor, scale: gl.tensor) -> gl.tuple:
    """Four e4m3 times a scale: those of bytes 0 and 2, then of 1 and 3.  scale: 2 ** 120 times as large."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 c, d;
        shl.b32 c, $2, 8;
        and.b32 c, c, 0x80008000;
        shl.b32 d, $2, 4;
        lop3.b32 c, d, 0x07F007F0, c, 0xEA;
        mul.rn.bf16x2 $0, c, $3;
        and.b32 c, $2, 0x80008000;
        shr.b32 d, $2, 4;
        lop3.b32 c, d, 0x07F007F0, c, 0xEA;
        mul.rn.bf16x2 $1, c, $3;
        }
        """,
        "=&r,=&r,r,r",
        [four, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def as_e4m3(low: gl.tensor, high: gl.tensor) -> gl.tensor:
    """Two fp32, each rounded to the nearest e4m3 (at most 448), in an int16: the first in its low byte.

    One instruction: bytes that are put together by shifts were wrong in every second pair as compiled by Triton 3.6.
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
        "=h,f,f",
        [low, high],
        dtype=gl.int16,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def e2m1_bytes(four: gl.tensor, low: gl.tensor, high: gl.tensor) -> gl.tuple:
    """Four bytes, eight e2m1, as e4m3: values 0 to 3 in one int32, 4 to 7 in another.

    low, high: e4m3 bytes of the magnitudes 0, 1/2, 1, 3/2 and 2, 3, 4, 6 under the values' scale.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, m;
        mov.b32 m, 0x80808080;
        shr.u32 b, $2, 16;
        and.b32 a, $2, 0x7777;
        prmt.b32 a, $3, $4, a;
        prmt.b32 s, m, m, $2;
        shl.b32 s, s, 7;
        lop3.b32 $0, s, m, a, 0xEA;
        and.b32 a, b, 0x7777;
        prmt.b32 a, $3, $4, a;
        prmt.b32 s, m, m, b;
        shl.b32 s, s, 7;
        lop3.b32 $1, s, m, a, 0xEA;
        }
        """,
        "=&r,=&r,r,r,r",
        [four, low, high],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def e2m1_halves(
    four: gl.tensor, low_near: gl.tensor, high_near: gl.tensor, low_far: gl.tensor, high_far: gl.tensor
) -> gl.tuple:
    """Four bytes, eight e2m1, as e4m3: low nibbles in one int32, high ones in another.

    low_near, high_near: e4m3 bytes of the magnitudes 0, 1/2, 1, 3/2 and 2, 3, 4, 6 under the scale of the low nibbles;
    low_far, high_far: of the high ones.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s;
        and.b32 a, $2, 0x07070707;
        shr.u32 b, a, 4;
        or.b32 a, a, b;
        prmt.b32 a, a, 0, 0x4420;
        prmt.b32 a, $3, $4, a;
        shl.b32 s, $2, 4;
        lop3.b32 $0, s, 0x80808080, a, 0xEA;
        shr.u32 b, $2, 4;
        and.b32 a, b, 0x07070707;
        shr.u32 b, a, 4;
        or.b32 a, a, b;
        prmt.b32 a, a, 0, 0x4420;
        prmt.b32 a, $5, $6, a;
        lop3.b32 $1, $2, 0x80808080, a, 0xEA;
        }
        """,
        "=&r,=&r,r,r,r,r,r",
        [four, low_near, high_near, low_far, high_far],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
