"""How do two warps gate a whole row and leave it restated?

Over a row's own length, in turns of 256 columns: 2,304 is nine of them, where a block of a power of two, as
`gpu_fp8.swiglu_rows` takes rows of any length, is 4,096, 44 % of it nothing. A row is asked for at once and stays in
registers until its largest value is known. Turned columns are stored as the words they stay, not byte by byte. The same
bits. Rows that a product has gated, half as long, are weighed, rounded and restated in the same way.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import gpu_fp8
from kernels.ops.gpu_formats import FP8_FLOOR, e4m3_bits, exponents, fp8_round_trip, power
from kernels.ops.gpu_fp8 import SpanRows, gathered, restated_twin
from kernels.ops.gpu_launch import check, runs_kernels
from kernels.ops.gpu_overlap import early, let_next_start, overlaps, wait_alone
from kernels.ops.quant import fp8_round_trip as fp8_round_trip_twin

COLUMNS, WARPS = 256, 2
"""Of a turn, and of a program: a lane has four columns, which stay a word wherever they are turned to."""
_MOST_TURNS = 10


def takes(width: int) -> bool:
    """Whether rows of so many values are a few whole turns, and tiles of turned columns."""
    columns = min(width & -width, COLUMNS)
    return columns >= 128 and width // columns <= _MOST_TURNS


def swiglu_rows(
    gate_up: Tensor,
    targets: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    limit: float,
    turns: bool = False,
    follows_product: bool = False,
) -> SpanRows:
    """The clamped SwiGLU of rows, rounded to fp8 and restated under one scale a row: as `gpu_fp8.swiglu_rows`.

    By this file's kernel where rows are a few whole turns.  follows_product: as for `gate_rows`.
    """
    if takes(gate_up.shape[1] // 2) and runs_kernels(gate_up):
        return gate_rows(gate_up, targets, factors, limit=limit, turns=turns, follows_product=follows_product)
    return gpu_fp8.swiglu_rows(gate_up, targets, factors, limit=limit, turns=turns)


def gate_rows(
    gate_up: Tensor,
    targets: Tensor | None,
    factors: Tensor | None,
    *,
    limit: float,
    turns: bool,
    follows_product: bool = False,
) -> SpanRows:
    """The same by this file's kernel.

    follows_product: rows are what was launched last on this stream, and began when targets and factors were there.
    """
    check((factors is None) == (targets is None), "factors have targets")
    given = None if factors is None or targets is None else (targets, factors)
    return _launch(gate_up, gate_up.shape[1] // 2, given, limit, turns=turns, follows_product=follows_product)


def weigh_rows(
    gated: Tensor, targets: Tensor, factors: Tensor, *, turns: bool, follows_product: bool = False
) -> SpanRows:
    """Rows that are gated, [positions, width] bf16, times their factors, rounded to fp8 and restated.

    As `gate_rows` leaves them, but of values that were rounded to bf16 before (`gpu_grouped_packed.multiply_gated`).
    """
    if not runs_kernels(gated):
        rows = restated_twin(fp8_round_trip_twin(gated.float() * factors[targets.long()][:, None]))
        return gathered(rows, torch.arange(len(rows), device=gated.device), turns=turns)
    return _launch(gated, gated.shape[1], (targets, factors), None, turns=turns, follows_product=follows_product)


def _launch(
    rows: Tensor,
    width: int,
    given: tuple[Tensor, Tensor] | None,
    limit: float | None,
    *,
    turns: bool,
    follows_product: bool,
) -> SpanRows:
    """given: targets and factors.  limit: None where rows are gated."""
    check(takes(width), "rows are a few whole turns")
    check(rows.dtype == torch.bfloat16 and rows.is_contiguous(), "rows are bf16, end to end")
    data = torch.empty(len(rows), width, dtype=torch.uint8, device=rows.device)
    scale = torch.empty(1, len(rows), dtype=torch.float32, device=rows.device)
    if len(rows):
        columns = min(width & -width, COLUMNS)
        can_overlap = overlaps(rows)
        overlap = follows_product and can_overlap
        targets, factors = given or (rows, rows)
        _gate_rows_kernel[(len(rows),)](
            rows,
            targets,
            factors,
            data,
            scale,
            limit,
            SIZE=width,
            COLUMNS=columns,
            TURNS=width // columns,
            WEIGHED=given is not None,
            TURNED=turns,
            OVERLAP=overlap,
            LETS_START=turns and can_overlap,
            num_warps=WARPS,
            **early(overlap),
        )
    return SpanRows(data.view(torch.float8_e4m3fn), scale, turns)


@triton.jit
def _gate_rows_kernel(
    rows: tl.tensor,
    targets: tl.tensor,
    factors: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    limit: tl.tensor | None,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
    WEIGHED: tl.constexpr,
    TURNED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LETS_START: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    row = rows + position * SIZE * (1 if limit is None else 2)
    if OVERLAP and WEIGHED:
        factor = tl.load(factors + tl.load(targets + position))
    # The next kernel may count on all that came before the product, so it starts when that is complete.
    wait_alone(OVERLAP)
    let_next_start(LETS_START)
    gates, ups = (), ()
    for turn in tl.static_range(TURNS):
        gates = gates + (tl.load(row + turn * COLUMNS + column),)  # noqa: RUF005 - a tuple of Triton's
        if limit is not None:
            ups = ups + (tl.load(row + SIZE + turn * COLUMNS + column),)  # noqa: RUF005 - as above
    if WEIGHED and not OVERLAP:
        factor = tl.load(factors + tl.load(targets + position))
    largest = tl.zeros((1, COLUMNS), tl.float32)
    made = ()
    for turn in tl.static_range(TURNS):
        values = gates[turn].to(tl.float32)
        if limit is not None:
            gate, up = tl.minimum(values, limit), ups[turn].to(tl.float32)
            values = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
        if WEIGHED:
            values *= factor
        values = fp8_round_trip(tl.reshape(values, (1, COLUMNS)), COLUMNS // 32)
        largest = tl.maximum(largest, tl.abs(values))
        made = made + (values,)  # noqa: RUF005 - as above
    exponent = exponents(tl.max(largest, axis=1), FP8_FLOOR, 448.0)
    place = column
    if TURNED:
        word = column % 128 // 4
        place = column // 128 * 128 + word % 4 * 32 + word // 16 * 16 + word % 16 // 4 * 4 + column % 4
        # The compiler does not see that words stay whole, and would store each byte by itself.
        place = tl.max_contiguous(tl.multiple_of(place, 4), 4)
    for turn in tl.static_range(TURNS):
        bits = e4m3_bits(made[turn] * tl.broadcast_to(power(254 - exponent)[:, None], (1, COLUMNS)))
        tl.store(data + position * SIZE + turn * COLUMNS + place, tl.reshape(bits, (COLUMNS,)))
    tl.store(scale + position + tl.arange(0, 1), power(exponent))
