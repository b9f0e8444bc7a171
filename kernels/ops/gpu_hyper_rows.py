"""How does one program take a token from one sublayer into the next?

All that `kernels.ops.gpu_hyper` does between two sublayers but for the coefficients: the streams take the output, their
mixture is normalised and rounded. A token's 50 kB are asked for before anything of it is stored (the compiler keeps
loads behind stores that might be to their place), so that they are all on their way at once, and the mixture stays in
registers. Programs that take slices of the hidden size write it, and their squares, for a second launch to read.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import FP8_FLOOR, bf16, e4m3_bits, exponents, fp8_round_trip, power
from kernels.ops.gpu_fp8 import SpanRows
from kernels.ops.hyper import Coefficients
from kernels.ops.quant import GROUP

COLUMNS, WARPS = 1024, 8
"""Of a turn, and of a program: two of them share a multiprocessor when 256 tokens go on."""
_MOST_TURNS = 8


def takes(hidden: int) -> bool:
    """Whether rows of so many values are a few whole turns."""
    columns = _columns(hidden)
    return columns >= GROUP and hidden // columns <= _MOST_TURNS


def go_on(
    streams: Tensor,
    output: Tensor | None,
    before: Coefficients,
    mixed_by: Tensor,
    norm: Tensor,
    *,
    eps: float,
    after: Tensor,
    x: Tensor,
    rounded: Tensor,
    restated: SpanRows | None,
) -> Tensor:
    """Write what `Entered` holds of rows: streams after the update, their mixture normalised, rounded, restated.

    streams, after: [tokens, 4, hidden] bf16.  output, x, rounded: [tokens, hidden] bf16.  Returns squares of the
    streams and of their mixture, [1, tokens, 2] fp32.
    """
    tokens, _, hidden = streams.shape
    columns = _columns(hidden)
    squares = torch.empty(1, tokens, 2, dtype=torch.float32, device=streams.device)
    if tokens:
        _go_on_kernel[(tokens,)](
            streams,
            streams if output is None else output,
            before.post,
            before.mix,
            mixed_by,
            norm,
            after,
            x,
            rounded,
            x if restated is None else restated.data.view(torch.uint8),
            squares if restated is None else restated.scale,
            squares,
            eps,
            HIDDEN=hidden,
            COLUMNS=columns,
            TURNS=hidden // columns,
            UPDATE=output is not None,
            RESTATES=restated is not None,
            num_warps=max(min(columns // 128, WARPS), 1),
        )
    return squares


def _columns(hidden: int) -> int:
    """The largest power of two that divides it, up to a turn's."""
    return min(hidden & -hidden, COLUMNS)


@triton.jit
def _go_on_kernel(  # noqa: C901, PLR0912 - the branches are choices at compile time
    streams: tl.tensor,
    output: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    pre: tl.tensor,
    norm: tl.tensor,
    after: tl.tensor,
    x: tl.tensor,
    rounded: tl.tensor,
    data: tl.tensor,
    row_scale: tl.tensor,
    squares: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
    UPDATE: tl.constexpr,
    RESTATES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    streams += token * 4 * HIDDEN
    after += token * 4 * HIDDEN
    row = token * HIDDEN
    old, new = (), ()
    for turn in tl.static_range(TURNS):
        for stream in tl.static_range(4):
            old = old + (tl.load(streams + stream * HIDDEN + turn * COLUMNS + column),)  # noqa: RUF005 - a tuple of Triton's
        if UPDATE:
            new = new + (tl.load(output + row + turn * COLUMNS + column),)  # noqa: RUF005 - as above
    into, shares, added = (), (), ()
    for stream in tl.static_range(4):
        into = into + (tl.load(pre + token * 4 + stream),)  # noqa: RUF005 - as above
        if UPDATE:
            added = added + (tl.load(post + token * 4 + stream),)  # noqa: RUF005 - as above
            for source in tl.static_range(4):
                shares = shares + (tl.load(mix + token * 16 + source * 4 + stream),)  # noqa: RUF005 - as above
    square = tl.zeros((COLUMNS,), tl.float32)
    mixed_square = tl.zeros((COLUMNS,), tl.float32)
    mixed = ()
    for turn in tl.static_range(TURNS):
        total = tl.zeros((COLUMNS,), tl.float32)
        for stream in tl.static_range(4):
            values = old[turn * 4 + stream].to(tl.float32)
            if UPDATE:
                values = new[turn].to(tl.float32) * added[stream]
                for source in tl.static_range(4):
                    values += old[turn * 4 + source].to(tl.float32) * shares[stream * 4 + source]
                values = bf16(values)
                tl.store(after + stream * HIDDEN + turn * COLUMNS + column, values.to(tl.bfloat16))
            total += values * into[stream]
            square += values * values
        total = bf16(total)
        mixed_square += total * total
        mixed = mixed + (total,)  # noqa: RUF005 - as above
    factors = ()
    for turn in tl.static_range(TURNS):
        factors = factors + (tl.load(norm + turn * COLUMNS + column),)  # noqa: RUF005 - as above
    squared = tl.sum(mixed_square, axis=0)
    length = tl.sqrt_rn(squared / HIDDEN + eps)
    largest = tl.zeros((1, COLUMNS), tl.float32)
    normed = ()
    for turn in tl.static_range(TURNS):
        values = bf16(mixed[turn] / length * factors[turn])
        tl.store(x + row + turn * COLUMNS + column, values.to(tl.bfloat16))
        values = fp8_round_trip(tl.reshape(values, (1, COLUMNS)), COLUMNS // 32)
        tl.store(rounded + row + turn * COLUMNS + column, tl.reshape(values, (COLUMNS,)).to(tl.bfloat16))
        largest = tl.maximum(largest, tl.abs(values))
        normed = normed + (values,)  # noqa: RUF005 - as above
    if RESTATES:
        exponent = exponents(tl.max(largest, axis=1), FP8_FLOOR, 448.0)
        for turn in tl.static_range(TURNS):
            bits = e4m3_bits(normed[turn] * tl.broadcast_to(power(254 - exponent)[:, None], (1, COLUMNS)))
            tl.store(data + row + turn * COLUMNS + column, tl.reshape(bits, (COLUMNS,)))
        tl.store(row_scale + token + tl.arange(0, 1), power(exponent))
    tl.store(squares + token * 2, tl.sum(square, axis=0))
    tl.store(squares + token * 2 + 1, squared)
