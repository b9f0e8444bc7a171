"""How are a gate and the up of its column gated in a kernel in Gluon, by the lane that has the sums of both?"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gated(values: gl.tensor, limit: gl.tensor) -> gl.tensor:
    """Eight rows of gate, their eight of up, and so on, clamped and gated: [outs, rows] fp32 -> [outs / 2, rows] bf16.

    Values are rounded to bf16 before. On the units' sums, of which a lane has rows eight apart, nothing moves.
    """
    OUTS: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    pairs = values.reshape([OUTS // 16, 2, 8, ROWS]).permute((0, 2, 3, 1)).reshape([OUTS // 2, ROWS, 2])
    gate, up = gl.split(pairs)
    return swiglu_of(gate, up, limit).to(gl.bfloat16)


@gluon.jit
def swiglu_of(gate: gl.tensor, up: gl.tensor, limit: gl.tensor) -> gl.tensor:
    """The clamped SwiGLU, fp32, of values that are rounded to bf16 first.

    Both are rounded by one instruction: the compiler's two each would go where exponentials and reciprocals queue.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 g, u, e, l;
        cvt.rn.bf16x2.f32 u, $2, $1;
        shl.b32 g, u, 16;
        and.b32 u, u, 0xFFFF0000;
        neg.f32 l, $3;
        min.f32 g, g, $3;
        max.f32 u, u, l;
        min.f32 u, u, $3;
        mul.f32 e, g, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 e, e;
        mul.f32 e, e, g;
        mul.f32 $0, e, u;
        }
        """,
        "=f,f,f,f",
        [gate, up, limit],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
