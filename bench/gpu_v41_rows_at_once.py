"""How fast are V4.1's kernels that move a whole row at once on this GPU, and do they make the same as others?

    python -m bench.gpu_v41_rows_at_once                # seconds: no weights
    python -m bench.gpu_v41_rows_at_once --only chosen

Each kernel beside its floor, in a graph, inputs rotated past the L2; outputs are poisoned first, and compared with
those of the kernels that take rows of any length. One JSON line for each; one that fails does not hide the others.
Whole steps: `bench.gpu_v41_step_ways`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_time import graph_seconds, machine, yardsticks
from bench.gpu_v41 import difference
from bench.gpu_v41_attention import poisoned
from bench.gpu_v41_cases import HIDDEN, LIMIT, TOP_ENTRIES, TOP_K, WIDTH
from kernels.ops import gpu_fp8
from kernels.ops.gpu_fp8 import SpanRows, gathered, span_rows
from kernels.ops.gpu_grouped import Groups
from kernels.ops.gpu_hyper import MixingWeights, enter, split_weight
from kernels.ops.gpu_index import select, select_by_counting
from kernels.ops.gpu_moe import group
from kernels.ops.gpu_placed_rows import place_rows
from kernels.ops.gpu_swiglu_rows import swiglu_rows
from kernels.ops.hyper import Coefficients

CUDA = torch.device("cuda")
TOKENS, CHUNK, HERE = 256, 16_384, 7
"""Rows of a decode step and of a prefill chunk, and experts of a rank."""
_NEAR = 3e-3
"""Relative L2 of what rounds otherwise."""
_CALLS = 24
Made = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step."""

    name: str
    other: Made
    """What the first call makes, by other kernels."""
    calls: Sequence[Made]
    """The same on different inputs; the first is compared."""
    num_bytes: float
    tolerance: float = 0.0
    """Relative L2, or the share of bytes; 0 asks for equal bits."""


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def chosen() -> Iterator[Part]:
    """Of what each token sees, in rows as wide as a captured step's; of candidates; of a chunk's."""
    for name, rows, width, sees, copies in (
        ("65,536", TOKENS, 131_072, 65_536, 1),
        ("131,072", TOKENS, 262_144, 131_072, 1),
        ("candidates", TOKENS, 16_384, 16_384, 8),
        ("a chunk", CHUNK, 8192, 8192, 1),
    ):
        seen = torch.full((rows,), sees, dtype=torch.int32, device=CUDA)
        scores = [noise(rows, width) for _ in range(copies)]

        def call(each: Tensor, by: Callable[..., Tensor] = select, seen: Tensor = seen) -> list[Tensor]:
            return [by(each, seen, count=TOP_ENTRIES)]

        other, calls = partial(call, scores[0], select_by_counting), [partial(call, each) for each in scores]
        yield Part(f"chosen, {name}", other, calls, 2.0 * rows * sees)


def streams() -> Iterator[Part]:
    """From one sublayer into the next, with the coefficients that a step makes beside; invariant otherwise."""
    weights = MixingWeights(
        split_weight(torch.randn(24, 4 * HIDDEN, device=CUDA) * 0.02),
        torch.rand(3, device=CUDA),
        torch.randn(24, device=CUDA),
        torch.rand(HIDDEN, device=CUDA),
        1e-20,
        1e-6,
        20,
    )
    for name, tokens, copies in (("decode", TOKENS, 4), ("a chunk", CHUNK, 1)):
        made = Coefficients(*(torch.rand(tokens, *size, device=CUDA) for size in ((4,), (4,), (4, 4))))
        output, rows = noise(tokens, HIDDEN), [noise(tokens, 4, HIDDEN) for _ in range(copies)]

        def call(
            rows: Tensor, made: Coefficients = made, output: Tensor = output, *, is_invariant: bool = False
        ) -> list[Tensor]:
            entered = enter(rows, output, made, weights, restates=True, is_invariant=is_invariant)
            assert entered.restated is not None, "asked for"
            parts = [entered.streams, entered.x, entered.rounded, entered.restated.data, entered.restated.scale]
            return [*parts, entered.made.pre, entered.made.post, entered.made.mix]

        other, calls = partial(call, rows[0], is_invariant=True), [partial(call, each) for each in rows]
        yield Part(f"streams, {name}", other, calls, 23.0 * HIDDEN * tokens, _NEAR)


def placed() -> Iterator[Part]:
    """Slots sorted by expert, and their rows."""
    x = span_rows(noise(TOKENS, HIDDEN), rounds=True)
    experts = torch.rand(TOKENS, HERE, device=CUDA).topk(TOP_K, dim=1).indices.int()

    def parts(groups: Groups, rows: SpanRows) -> list[Tensor]:
        assert groups.places is not None, "sorted ones have places"
        return [groups.ends, groups.sources, groups.targets, groups.places, rows.data, rows.scale]

    def other() -> list[Tensor]:
        groups = group(experts, num_experts=HERE)
        return parts(groups, gathered(x, groups.sources, turns=True))

    def call() -> list[Tensor]:
        return parts(*place_rows(experts, x, num_experts=HERE, turns=True))

    yield Part("placed", other, [call], 1.0 * TOKENS * (1 + TOP_K) * HIDDEN)


def gated() -> Iterator[Part]:
    """Routed experts' rows, turned and weighed."""
    for name, rows, copies in (("decode", TOKENS * TOP_K, 4), ("a chunk", CHUNK * TOP_K, 1)):
        targets, factors = torch.randperm(rows, device=CUDA).int(), torch.rand(rows, device=CUDA)
        boths = [noise(rows, 2 * WIDTH) for _ in range(copies)]

        def call(
            both: Tensor,
            by: Callable[..., SpanRows] = swiglu_rows,
            targets: Tensor = targets,
            factors: Tensor = factors,
        ) -> list[Tensor]:
            made = by(both, targets, factors, limit=LIMIT, turns=True)
            return [made.data, made.scale]

        other, calls = partial(call, boths[0], gpu_fp8.swiglu_rows), [partial(call, each) for each in boths]
        yield Part(f"gated, {name}", other, calls, 5.0 * rows * WIDTH)


def measure(part: Part, copy_rate: float) -> bool:
    """Compare, then time."""
    is_long = part.num_bytes > 1e9
    with poisoned():
        expected, got, again = ([each.clone() for each in made()] for made in (part.other, *[part.calls[0]] * 2))
    error = max(difference(a, b) for a, b in zip(expected, got, strict=True))
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, again, strict=True))
    seconds = graph_seconds([*part.calls] * (2 if is_long else max(_CALLS // len(part.calls), 1)))
    floor, passed = part.num_bytes / copy_rate, error <= part.tolerance and same
    say(
        part.name,
        us=round(seconds * 1e6, 1),
        floor_us=round(floor * 1e6, 1),
        ratio=round(seconds / floor, 2),
        error=error,
        repeats=same,
        passed=passed,
    )
    return passed


def say(part: str, **facts: Any) -> None:
    print(json.dumps({"bench": "gpu_v41_rows_at_once", "part": part, **facts}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression")
    wanted, ceilings, passed = re.compile(parser.parse_args().only), yardsticks(), True
    say("machine", machine=machine(), **{name: round(value, 9) for name, value in ceilings.items()})
    for parts in (chosen, streams, placed, gated):
        if not wanted.match(parts.__name__):
            continue
        for part in parts():
            try:
                passed &= measure(part, ceilings["copy_bytes_per_second"])
            except Exception as error:  # noqa: BLE001 - said, and the next is timed
                say(part.name, failed=f"{type(error).__name__}: {str(error)[-400:]}", passed=False)
                traceback.print_exc(limit=4, file=sys.stderr)
                passed = False
    return int(not passed)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
