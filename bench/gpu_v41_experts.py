"""Which way of multiplying V4.1's experts and dense matrices is right on this GPU, and which is fastest?

    python -m bench.gpu_v41_experts                       # all: decode prefill dense packed
    python -m bench.gpu_v41_experts decode dense --ways "library|fp8 128x128"
    python -m bench.gpu_v41_experts packed                # fp4 in registers alone, its ways beside each other: seconds

One JSON line per figure, a table last. Every way is compared with fp64 products of the exact values before it is timed:
`error` is the relative L2 distance of what it returns (bf16: about 0.0017 by its own rounding). Times are of one call
in a graph, weights rotated past the L2.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu_time import machine, yardsticks
from bench.gpu_v41_attention import poisoned
from bench.gpu_v41_cases import HIDDEN, LIMIT, TOP_K, WIDTH
from bench.gpu_v41_dense import dense
from bench.gpu_v41_expert_work import noise, random_weights
from bench.gpu_v41_ways import (
    DEEP,
    PLAIN_TOLERANCE,
    Way,
    fp8_call,
    measure,
    named,
    only,
    print_table,
    restated_rows,
    say,
)
from bench.gpu_v41_work import Shape, decode_shape, prefill_shape
from kernels.ops import gpu_grouped, gpu_grouped_packed
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, gathered, grouped_product, span_rows, swiglu_rows
from kernels.ops.gpu_grouped import Groups, Weights, bf16_weights
from kernels.ops.gpu_grouped_fp8 import CUT, Cut
from kernels.ops.gpu_grouped_unpack import Packed, Powers, powers_of, unpack
from kernels.ops.gpu_moe import group
from kernels.ops.gpu_quant import round_fp8, swiglu_fp8, swiglu_twin
from kernels.ops.gpu_swiglu_rows import gate_rows, weigh_rows
from kernels.ops.quant import fp8_round_trip

GATED_TOLERANCE = 1.2e-2
"""Relative L2 at most: what ends in fp8 has roundings that a last bit of bf16 decides."""
CUTS = ((Cut(64, 128, 4, 4), 128), (CUT, DEEP))
E4M3 = torch.float8_e4m3fn
_POWERS = replace(gpu_grouped_packed.CUT, widths=(64, 128, 256), sharing_rounds=0)
_TO_240 = replace(_POWERS, widths=(64, 128, 192, 224, 240, 256))
_SIXTEENTHS = (64, 128, 160, 176, 192, 208, 224, 240, 256)
PACKED: dict[str, gpu_grouped_packed.Cut] = {
    "fp4 in registers, powers of two": _POWERS,
    "fp4 in registers": gpu_grouped_packed.CUT,
    "fp4 in registers, 192 and 224": replace(_POWERS, widths=(64, 128, 192, 224, 256)),
    "fp4 in registers, 192 to 240": _TO_240,
    "fp4 in registers, 192 to 240, 3 stages": replace(_TO_240, stages=3),
    "fp4 in registers, 192 to 288, 3 stages": replace(_TO_240, widths=(*_TO_240.widths, 288), stages=3),
    "fp4 in registers, every sixteenth": replace(_POWERS, widths=_SIXTEENTHS),
    "fp4 in registers, powers of two, shared": replace(_POWERS, sharing_rounds=4),
    "fp4 in registers, 192 to 240, shared": replace(_TO_240, sharing_rounds=4),
}
"""How each cuts: the rows of its tiles, and whether a last round's are shared. All must give the first one's bits."""
GATED: dict[str, gpu_grouped_packed.Cut | None] = {
    "": None,
    ", to 288, 4 stages": replace(gpu_grouped_packed.MANY, stages=4),
}
"""How a product that gates cuts: rooms of half the width leave room for a turn more."""
FIRST_SIX = tuple(PACKED)[:6]
"""For a long run."""
FEW = 48
"""Rows of a rank's experts when few requests decode."""


def exact_products(x: Tensor, weights: Weights, groups: Groups, experts: range) -> Tensor:
    """[rows of these experts in order of positions, out] fp64."""
    ends = [0, *groups.ends.tolist()]
    made = []
    for expert in experts:
        rows = groups.sources[ends[expert] : ends[expert + 1]].long()
        made.append(x[rows].double() @ weights.dense(expert).double().T)
    return torch.cat(made)


def gated_of(both: Tensor, factors: Tensor) -> Tensor:
    return fp8_round_trip(swiglu_twin(both.bfloat16().float(), factors, limit=LIMIT))


def routed(shape: Shape) -> tuple[Groups, Groups]:
    """Groups with sources that are tokens, and with sources that are slots."""
    wanted = TOP_K if shape.is_prefill else 1
    experts = torch.rand(shape.rows // wanted, shape.experts, device="cuda").topk(wanted, dim=1).indices.int()
    groups = group(experts, num_experts=shape.experts)
    return groups, replace(groups, sources=groups.targets)


def row_scaled_of(weights: Weights) -> RowScaled:
    """Of fp4 matrices, by the kernel, which must be exact."""
    powers = powers_of(weights)
    made = unpack(weights, powers)
    exact = powers.is_exact and torch.equal(made.dense(0), weights.dense(0))
    say("unpack", experts=weights.experts, out=weights.out, size=weights.size, is_exact=exact)
    return made


def decode() -> None:
    """One rank's seven experts with 1,536 rows: gate and up, then down."""
    shape = decode_shape()
    groups, straight = routed(shape)
    rows, factors = shape.rows, torch.rand(shape.rows, device="cuda")
    for what, size, out, own in (("decode up", HIDDEN, 2 * WIDTH, groups), ("decode down", WIDTH, HIDDEN, straight)):
        gated = what.endswith("up")
        x = round_fp8(noise(rows, size))
        packed = [random_weights("fp4", shape.experts, out, size) for _ in range(shape.copies)]
        eighths, wides = [row_scaled_of(each) for each in packed], [bf16_weights(each) for each in packed]
        exact = exact_products(x, packed[0], own, range(shape.experts))
        in_order = gated_of(exact, factors[own.targets.long()]) if gated else exact
        flops = 2.0 * rows * out * size
        tolerance = GATED_TOLERANCE if gated else PLAIN_TOLERANCE
        targets = own.targets.long()

        calls = [today(x, each, own, factors if gated else None, rows) for each in wides]
        measure(what, Way("bf16 now", calls, in_order, targets, tolerance), flops)
        in_place = x[own.sources.long()]
        library_grouped(what, in_place, own, wides, exact, flops)
        library_fp8(what, x, own, eighths, exact, flops)
        in_registers(what, x, own, packed, exact, flops)
        for span in (128, DEEP):
            spans = span_rows(x, own.sources, span=span)
            restate = [partial(restated_rows, x, own.sources, span=span)]
            measure(what, Way(f"restate {span}", restate, None), 0.0, 3.0 * rows * size)
            for cut, wanted in CUTS:
                if wanted != span:
                    continue
                calls = [fp8_call(spans, each, own, cut, factors if gated else None, rows) for each in eighths]
                counted = None if gated else targets
                measure(what, Way(f"fp8 {named(cut)} k{span}", calls, in_order, counted, tolerance), flops)


def today(x: Tensor, weights: Weights, own: Groups, factors: Tensor | None, rows: int) -> Callable[[], Tensor]:
    """The product without fp8 units; gated where there are factors."""
    if factors is not None:
        return partial(gpu_grouped.multiply_gated, x, weights, own, factors, limit=LIMIT, num_out=rows)
    return partial(gpu_grouped.multiply, x, weights, own, num_out=rows)


def library_grouped(what: str, x: Tensor, own: Groups, wides: list[Weights], exact: Tensor, flops: float) -> None:
    """The library's grouped product of rows in order, in bf16."""
    calls: list[Callable[[], Tensor]] = [
        partial(torch._grouped_mm, x, each.data.transpose(1, 2), offs=own.ends)  # noqa: SLF001 - no public name
        for each in wides
    ]
    measure(what, Way("library bf16 grouped, product alone", calls, exact), flops)
    if what.endswith("up"):
        both, factors = torch.randn(len(x), wides[0].out, device="cuda").bfloat16(), torch.ones(len(x), device="cuda")
        after = [partial(swiglu_fp8, both, factors, limit=LIMIT)]
        measure(what, Way("library bf16 grouped, swiglu", after, None))


def library_fp8(what: str, x: Tensor, own: Groups, eighths: list[RowScaled], exact: Tensor, flops: float) -> None:
    """The library's grouped product of restated rows, and the kernels around it."""
    whole = span_rows(x)
    rows = gathered(whole, own.sources)
    size = float(rows.data.numel())
    calls: list[Callable[[], Tensor]] = [partial(grouped_product, rows, each, own.ends) for each in eighths]
    measure(
        what, Way("library fp8 grouped, product alone", calls, exact, torch.arange(len(exact), device="cuda")), flops
    )
    if what.endswith("up"):
        measure(what, Way("gather", [lambda: gathered(whole, own.sources).data], None), 0.0, 2.0 * size)
        both, factors = noise(len(rows), eighths[0].out), torch.ones(len(rows), device="cuda")
        after = [lambda: swiglu_rows(both, own.targets, factors, limit=LIMIT).data]
        measure(what, Way("swiglu, a scale a row", after, None), 0.0, 2.5 * both.numel())


def in_registers(
    what: str,
    x: Tensor,
    own: Groups,
    packed: list[Weights],
    exact: Tensor,
    flops: float,
    names: tuple[str, ...] = tuple(PACKED),
) -> None:
    """fp4 that becomes e4m3 on its way to the units."""
    counted, calls_by = torch.arange(len(exact), device="cuda"), packed_calls(x, own, packed)
    for name in names:
        measure(what, Way(name, calls_by[name], exact, counted, 4e-3), flops)


def packed_calls(x: Tensor, own: Groups, packed: list[Weights]) -> dict[str, list[Callable[[], Tensor]]]:
    """The same on each of the matrices, by each way."""
    rows, matrices = gathered(span_rows(x), own.sources, turns=True), [(each, powers_of(each)) for each in packed]
    return {
        name: [partial(gpu_grouped_packed.multiply, rows, *each, own.ends, cut=cut) for each in matrices]
        for name, cut in PACKED.items()
    }


def gated_in_product(what: str, x: Tensor, own: Groups, packed: list[Weights], exact: Tensor, flops: float) -> None:
    """Gate and up as rows of the next product, gated after they are multiplied or by those who multiply them."""
    rows, counted = gathered(span_rows(x), own.sources, turns=True), torch.arange(len(exact), device="cuda")
    factors, ends, targets = torch.rand(len(own.targets), device="cuda"), own.ends, own.targets
    plain = [Packed(each, powers_of(each), None) for each in packed]
    mixed = [each.interleaved() for each in plain]
    in_order = gated_of(exact, factors[targets[: len(exact)].long()])

    def after(up: Packed) -> SpanRows:
        both = gpu_grouped_packed.multiply(rows, up.weights, up.powers, ends)
        return gate_rows(both, targets, factors, limit=LIMIT, turns=True, follows_product=True)

    def within(up: Packed, cut: gpu_grouped_packed.Cut | None) -> SpanRows:
        gated = gpu_grouped_packed.multiply_gated(rows, up, ends, limit=LIMIT, cut=cut)
        return weigh_rows(gated, targets, factors, turns=True, follows_product=True)

    ways: dict[str, list[Callable[[], SpanRows]]] = {"gated after it": [partial(after, each) for each in plain]}
    ways |= {f"gated in it{of}": [partial(within, each, cut) for each in mixed] for of, cut in GATED.items()}
    for name, calls in ways.items():
        error = float((calls[0]().dense()[counted] - in_order).norm() / in_order.norm())
        say("gated", what=what, way=name, error=error, passed=error < GATED_TOLERANCE)
        measure(what, Way(f"fp4 in registers, {name}", [partial(_data, each) for each in calls], None), flops)
    once, expected = partial(gpu_grouped_packed.multiply_gated, rows, ends=ends, limit=LIMIT), exact.bfloat16().float()
    alone = [partial(once, each) for each in mixed]
    gated = swiglu_twin(expected, None, limit=LIMIT)
    measure(what, Way("fp4 in registers, gated, product alone", alone, gated, counted, 8e-3), flops)


def _data(call: Callable[[], SpanRows]) -> Tensor:
    return call().data


def same_bits(what: str, x: Tensor, own: Groups, packed: list[Weights], names: tuple[str, ...]) -> None:
    """Of all rows, as the first way made them, in memory that was poisoned."""
    first, end, calls_by = None, int(own.ends[-1]), packed_calls(x, own, packed)
    for name in names:
        try:
            with poisoned():
                made = calls_by[name][0]()[:end].clone()
            first = made if first is None else first
            same, finite = torch.equal(first, made), bool(made.isfinite().all())
            say("bits", what=what, way=name, same=same, finite=finite, passed=same and finite)
        except Exception as failed:  # noqa: BLE001 - a way that fails must not hide the others
            say("failed", what=what, way=name, failed=f"{type(failed).__name__}: {str(failed)[-400:]}")


def packed_alone() -> None:
    """A decode step's experts, with few rows too, and a prefill's; of these, the first eight experts' are compared."""
    few = replace(decode_shape(), rows=FEW)
    for name, shape in (("decode", decode_shape()), ("decode, few rows,", few), ("prefill", prefill_shape())):
        groups, straight = routed(shape)
        for half, size, out, own in (("up", HIDDEN, 2 * WIDTH, groups), ("down", WIDTH, HIDDEN, straight)):
            what, names = f"{name} {half}", FIRST_SIX if shape.is_prefill else tuple(PACKED)
            x = round_fp8(noise(shape.rows // (TOP_K if shape.is_prefill and half == "up" else 1), size))
            matrices = [random_weights("fp4", shape.experts, out, size) for _ in range(shape.copies)]
            exact = exact_products(x, matrices[0], own, range(min(shape.experts, 8)))
            in_registers(what, x, own, matrices, exact, 2.0 * shape.rows * out * size, names)
            same_bits(what, x, own, matrices[:1], names)
            if half == "up":
                gated_in_product(what, x, own, matrices, exact, 2.0 * shape.rows * out * size)
        torch.cuda.empty_cache()


def unpacked(packed: Weights, powers: Powers, room: Tensor) -> Tensor:
    """The room, written."""
    return unpack(packed, powers, room).data


def prefill() -> None:
    """All 384 experts with 98,304 rows, fp4 in memory; the first eight experts' rows are compared."""
    shape = prefill_shape()
    groups, straight = routed(shape)
    rows, factors = shape.rows, torch.rand(shape.rows, device="cuda")
    end = int(groups.ends[7])
    for what, size, out, own in (("prefill up", HIDDEN, 2 * WIDTH, groups), ("prefill down", WIDTH, HIDDEN, straight)):
        gated = what.endswith("up")
        x = round_fp8(noise(rows // (TOP_K if gated else 1), size))
        packed = random_weights("fp4", shape.experts, out, size)
        exact = exact_products(x, packed, own, range(8))
        in_order = gated_of(exact, factors[own.targets[:end].long()]) if gated else exact
        flops, targets = 2.0 * rows * out * size, own.targets[:end].long()
        tolerance = GATED_TOLERANCE if gated else PLAIN_TOLERANCE
        calls = [today(x, packed, own, factors if gated else None, rows)]
        measure(what, Way("fp4 now", calls, in_order, targets, tolerance), flops)
        powers, room = powers_of(packed), torch.empty(shape.experts, out, size, dtype=E4M3, device="cuda")
        moved = packed.num_bytes + float(room.nbytes)
        measure(what, Way("unpack", [partial(unpacked, packed, powers, room)], None), 0.0, moved)
        eighth = unpack(packed, powers, room)
        counted = torch.arange(end, device="cuda") if gated else targets
        library_fp8(what, x, own, [eighth], exact, flops)
        in_registers(what, x, own, [packed], exact, flops)
        for cut, span in CUTS:
            spans = span_rows(x, own.sources, span=span)
            call = fp8_call(spans, eighth, own, cut, factors if gated else None, rows)
            measure(what, Way(f"fp8 {named(cut)} k{span}", [call], in_order, counted, tolerance), flops)
        restate = [partial(restated_rows, x, own.sources)]
        measure(what, Way("restate", restate, None), 0.0, 3.0 * rows * size)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"decode": decode, "prefill": prefill, "dense": dense, "packed": packed_alone}
    parser.add_argument("what", nargs="*", metavar="PART", help=", ".join(parts) + "; all otherwise")
    parser.add_argument("--ways", default="", help="regular expression: ways whose names begin like it")
    asked = parser.parse_args()
    only(asked.ways)
    with torch.inference_mode():
        torch.manual_seed(1)
        say("machine", machine=machine(), **{name: round(value, 9) for name, value in yardsticks().items()})
        for name in asked.what or parts:
            try:
                parts[name]()
            except Exception as failed:  # noqa: BLE001 - the other parts must not be hidden
                say("failed", what=name, failed=f"{type(failed).__name__}: {str(failed)[-400:]}")
                traceback.print_exc(limit=4, file=sys.stderr)
            torch.cuda.empty_cache()
    print_table()


if __name__ == "__main__":
    main()
