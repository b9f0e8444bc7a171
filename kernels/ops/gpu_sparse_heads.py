"""How do a token's queries come to an attention on Hopper, and how does what it has summed leave?

Queries are turned to the token's position on their way into shared memory, even elements of a head first. What is left
is turned back and rounded to fp8: as bf16, or restated for the product that follows.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, has-type"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.ops.gpu_words import as_e4m3


@gluon.jit
def power_of(exponent: gl.tensor) -> gl.tensor:
    return (exponent.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _bf16(x: gl.tensor) -> gl.tensor:
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def fetch_queries(rows: gl.tensor, chunk: gl.constexpr, CHUNK: gl.constexpr, TURN: gl.constexpr) -> gl.tensor:
    """Some columns of queries, two bf16 in an int32; rows: [heads] where each begins."""
    pair = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TURN))
    return gl.load(rows[:, None] + pair[None, :])


@gluon.jit
def angles(table: gl.tensor, token: gl.tensor, other: gl.constexpr, PAIRS: gl.constexpr, CHUNK: gl.constexpr,
            TURN: gl.constexpr) -> gl.tensor:  # fmt: skip
    """Of the last chunk's pairs; [1, pairs]."""
    turned = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TURN)) - (CHUNK - PAIRS)
    return gl.load(table + token * PAIRS + turned, mask=turned >= 0, other=other)[None, :]


@gluon.jit
def plain_words(pairs: gl.tensor) -> gl.tuple:
    """[heads, pairs] of elements -> [heads, pairs / 2]: two even elements in a word, two odd ones."""
    first, then = gl.split(pairs.reshape([pairs.shape[0], pairs.shape[1] // 2, 2]))
    return (first & 0xFFFF) | (then << 16), ((first >> 16) & 0xFFFF) | (then & -65536)


@gluon.jit
def turned_words(pairs: gl.tensor, c: gl.tensor, s: gl.tensor) -> gl.tuple:
    """Likewise, turned."""
    even = (pairs << 16).to(gl.float32, bitcast=True)
    odd = (pairs & -65536).to(gl.float32, bitcast=True)
    low, high = _bf16(even * c - odd * s), _bf16(odd * c + even * s)
    turned = (low.to(gl.int32, bitcast=True) >> 16) & 0xFFFF
    return plain_words(turned | high.to(gl.int32, bitcast=True))


@gluon.jit
def _exponent(largest: gl.tensor) -> gl.tensor:
    """Of the least power of two that is not less than largest / 448, at least 1e-4 / 448: 448 is 1.75 * 2 ** 8."""
    return ((gl.maximum(largest, 1e-4).to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8


@gluon.jit
def _largest(low: gl.tensor, high: gl.tensor) -> gl.tensor:
    return gl.max(gl.maximum(gl.abs(low), gl.abs(high)), axis=1)


@gluon.jit
def _left(
    summed: gl.shared_memory_descriptor,
    c: gl.tensor,
    s: gl.tensor,
    chunk: gl.constexpr,
    HALF: gl.constexpr,
    CHUNK: gl.constexpr,
    TURN: gl.constexpr,
) -> gl.tuple:
    """Some columns of the outcome, the last ones turned back, rounded to fp8: even and odd ones, fp32."""
    ROWS: gl.constexpr = summed.shape[0]
    even = summed.slice(chunk * CHUNK, CHUNK, dim=1).load(TURN).to(gl.float32)
    odd = summed.slice(HALF + chunk * CHUNK, CHUNK, dim=1).load(TURN).to(gl.float32)
    if chunk == HALF // CHUNK - 1:
        back_even = _bf16(even * c + odd * s)
        back_odd = _bf16(odd * c - even * s)
    else:
        back_even, back_odd = even, odd
    highest = gl.maximum(gl.abs(back_even), gl.abs(back_odd)).reshape([ROWS, CHUNK // 16, 16])
    exponent = gl.expand_dims(_exponent(gl.max(highest, axis=2)), 2)
    exponent = exponent.broadcast_to([ROWS, CHUNK // 16, 16]).reshape([ROWS, CHUNK])
    exponent = gl.convert_layout(exponent, TURN, assert_trivial=True)
    factor, inverse = power_of(exponent), power_of(254 - exponent)
    low = (back_even * inverse).to(gl.float8e4nv).to(gl.float32) * factor
    high = (back_odd * inverse).to(gl.float8e4nv).to(gl.float32) * factor
    return low, high


@gluon.jit
def leave(
    summed: gl.shared_memory_descriptor,
    c: gl.tensor,
    s: gl.tensor,
    out: gl.tensor,
    spans: gl.tensor,
    rows: gl.tensor,
    token: gl.tensor,
    PER_GROUP: gl.constexpr,
    HALF: gl.constexpr,
    CHUNK: gl.constexpr,
    TURN: gl.constexpr,
) -> None:
    """What was summed, turned back and rounded, as bf16 or restated."""
    HEADS: gl.constexpr = summed.shape[0]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, TURN))
    for chunk in gl.static_range(HALF // CHUNK):
        pair = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TURN))
        low, high = _left(summed, c, s, chunk, HALF, CHUNK, TURN)
        if PER_GROUP == 0:
            packed = (low.to(gl.uint32, bitcast=True) >> 16) | (high.to(gl.uint32, bitcast=True) & 0xFFFF0000)
            gl.store(out + (token * HEADS + head[:, None]) * HALF + pair[None, :], packed.to(gl.int32, bitcast=True))
        elif chunk % 2 == 0:
            low_before, high_before = low, high
        else:
            exponent = _exponent(gl.maximum(_largest(low_before, high_before), _largest(low, high)))
            inverse = power_of(254 - exponent)[:, None]
            row = head // PER_GROUP * (rows // (HEADS // PER_GROUP)) + token
            inside = head % PER_GROUP
            place = out + row.to(gl.int64)[:, None] * (PER_GROUP * HALF) + inside[:, None] * HALF + pair[None, :]
            gl.store(place - CHUNK, as_e4m3(low_before * inverse, high_before * inverse))
            gl.store(place, as_e4m3(low * inverse, high * inverse))
            span = inside * (HALF // (2 * CHUNK)) + chunk // 2
            gl.store(spans + span * rows + row, power_of(exponent))
