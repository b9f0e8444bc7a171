"""How is one of several ways to compute the same thing compared with what is right, and timed?"""

from __future__ import annotations

import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu_time import graph_seconds
from bench.gpu_v41_cases import LIMIT
from kernels.ops import gpu_grouped_fp8
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, span_rows
from kernels.ops.gpu_grouped import Groups
from kernels.ops.gpu_grouped_fp8 import Cut

AT_LEAST = 24
"""Calls in a graph."""
PLAIN_TOLERANCE = 3e-3
"""Relative L2 at most, of sums rounded to bf16."""
_LONG_FLOPS, _LONG_BYTES = 1e12, 5e9
"""Of a call that takes long enough by itself."""
DEEP = 256
"""Columns under one scale, as the product has them where it can."""
_wanted = [re.compile("")]
_table: list[tuple[str, str, float, float, float]] = []


def say(figure: str, **named: Any) -> None:
    print(json.dumps({"bench": "gpu_v41_experts", "figure": figure, **named}), flush=True)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a result."""

    name: str
    calls: Sequence[Callable[[], Tensor]]
    """The same on different weights; the first is compared."""
    expected: Tensor | None
    """What the first makes; None: only timed."""
    rows: Tensor | None = None
    """Rows of the result that count."""
    tolerance: float = PLAIN_TOLERANCE


def only(ways: str) -> None:
    """Measure those whose names begin like this regular expression."""
    _wanted[0] = re.compile(ways)


def measure(what: str, way: Way, flops: float = 0.0, num_bytes: float = 0.0) -> None:
    """Compare, then time; one way that fails does not hide the others."""
    if not _wanted[0].match(way.name):
        return
    try:
        error, same = _error(way)
        is_long = flops > _LONG_FLOPS or num_bytes > _LONG_BYTES
        seconds = graph_seconds([*way.calls] if is_long else [*way.calls] * max(AT_LEAST // len(way.calls), 1))
    except Exception as failed:  # noqa: BLE001 - as said
        say("failed", what=what, way=way.name, failed=f"{type(failed).__name__}: {str(failed)[-400:]}")
        traceback.print_exc(limit=3, file=sys.stderr)
        return
    tflops = flops / seconds / 1e12
    say(
        "time",
        what=what,
        way=way.name,
        us=round(seconds * 1e6, 1),
        tflops=round(tflops, 1),
        gbps=round(num_bytes / seconds / 1e9),
        error=error,
        repeats=same,
        passed=error <= way.tolerance and same,
    )
    _table.append((what, way.name, seconds * 1e6, tflops, error))


def print_table() -> None:
    """What was timed, in order of names."""
    for what, way, us, tflops, error in sorted(_table):
        print(f"{what:26} {way:46} {us:10.1f} us {tflops:7.1f} TFLOP/s  error {error:.2e}")


def _error(way: Way) -> tuple[float, bool]:
    if way.expected is None:
        return 0.0, True
    made, again = way.calls[0](), way.calls[0]()
    if way.rows is not None:
        made, again = made[way.rows], again[way.rows]
    expected = way.expected.double()
    error = float((made.double() - expected).norm() / expected.norm())
    return (float("inf") if math.isnan(error) else error), torch.equal(made, again)


def restated_rows(x: Tensor, sources: Tensor | None = None, *, span: int = 0) -> Tensor:
    """What `span_rows` writes."""
    return span_rows(x, sources, span=span).data


def named(cut: Cut) -> str:
    return f"{cut.rows}x{cut.outs} w{cut.warps} s{cut.stages}"


def fp8_call(
    spans: SpanRows, weights: RowScaled, own: Groups, cut: Cut, factors: Tensor | None, rows: int
) -> Callable[[], Tensor]:
    """Gated where there are factors."""
    if factors is not None:
        return lambda: gpu_grouped_fp8.multiply_gated(spans, weights, own, factors, limit=LIMIT, cut=cut)
    return lambda: gpu_grouped_fp8.multiply(spans, weights, own, num_out=rows, cut=cut)
