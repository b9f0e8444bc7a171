"""Which way of V4.1's sparse attention and index scores is right on this GPU, and fastest?

    python -m bench.gpu_v41_attention            # also: --only attention, --only index

Every way is compared with its CPU twin first (outputs poisoned, twice), then at the shapes of a decode step and of a
prefill chunk with the way in use, then timed there: about two minutes. One JSON line each; a way that fails does not
hide the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.gpu_time import graph_seconds, machine, yardsticks
from bench.gpu_v41 import check_case, difference, floor_seconds
from bench.gpu_v41_cases import FAMILIES, Draw
from bench.gpu_v41_work import Builder, Work, decode_shape, prefill_shape
from kernels.ops import gpu_index, gpu_sparse

_ALIKE = 0.03
"""Relative error between two ways, whose roundings to fp8 fall apart now and then."""

Way = dict[tuple[Any, str], Any]
"""What is set, in which module, while a way is in force."""


def attention_ways() -> dict[str, Way]:
    return {
        "in use": {},
        "those who sum ask": {(gpu_sparse, "SUMS_ASK"): True},
        "in Triton": {(gpu_sparse, "_fits_hopper"): lambda *_: False},
    }


def index_ways() -> dict[str, Way]:
    others: dict[str, Way] = {f"{count} products": {(gpu_index, "HOPPER_UNITS"): count} for count in (8, 32)}
    return {"in use": {}, "in Triton": {(gpu_index, "_fits_hopper"): lambda _: False}} | others


def say(figure: str, **named: Any) -> None:
    print(json.dumps({"bench": "gpu_v41_attention", "figure": figure, **named}), flush=True)


@contextmanager
def in_force(way: Way) -> Iterator[None]:
    before = {place: getattr(*place) for place in way}
    for (module, name), value in way.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def survives(name: str, act: Callable[[], bool]) -> bool:
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - a way that fails must not hide the others
        say("failed", way=name, failed=f"{type(error).__name__}: {str(error)[-600:]}")
        traceback.print_exc(limit=4, file=sys.stdout)
        return False


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN and the largest whole numbers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # a module class has it
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as above
        torch.use_deterministic_algorithms(False)


def check(ways: dict[str, Way], family: str, begins: str) -> dict[str, bool]:
    """Against CPU twins, at real dimensions and few tokens."""
    right = dict.fromkeys(ways, True)
    for case in FAMILIES[family](Draw(1)):
        if not case.name.startswith(begins):
            continue
        for name, way in ways.items():
            with in_force(way), poisoned():
                say("way", way=name)
                right[name] &= survives(name, lambda: check_case(case))  # noqa: B023 - called at once
    return right


def outputs(work: Work) -> list[Tensor]:
    with poisoned():
        made = work.calls[0]()
    parts = made if isinstance(made, tuple) else (getattr(made, "scores", made), getattr(made, "blocks", None))
    return [each for each in parts if isinstance(each, Tensor)]


def apart(expected: Tensor, got: Tensor) -> float:
    """Where both have values: scores that no token sees are -inf, or left alone, as programs happen to be cut."""
    both = expected.isfinite() & got.isfinite()
    return difference(expected[both], got[both])


def time_ways(step: str, works: list[Work], ways: dict[str, Way], ceilings: dict[str, float]) -> None:
    """Beside the first way's values, and its time."""
    for work in works:
        with in_force(next(iter(ways.values()))):
            expected = [each.clone() for each in outputs(work)]
        for name, way in ways.items():
            with in_force(way):
                survives(name, lambda: time_way(step, work, name, expected, ceilings))  # noqa: B023 - as above


def time_way(step: str, work: Work, name: str, expected: list[Tensor], ceilings: dict[str, float]) -> bool:
    got = [each.clone() for each in outputs(work)]
    again = outputs(work)
    error = max(apart(a, b) for a, b in zip(expected, got, strict=True))
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, again, strict=True))
    del got, again
    took = graph_seconds(work.calls * max(24 // len(work.calls), 1) if work.num_bytes < 1e9 else work.calls)
    least = floor_seconds(work, ceilings)
    say(
        "kernel",
        step=step,
        kernel=work.name,
        way=name,
        us=round(took * 1e6, 1),
        floor_us=round(least * 1e6, 1),
        ratio=round(took / least, 2),
        step_ms=round(took * work.count * 1e3, 3),
        error=error,
        repeats_bit_equal=same,
        passed=error < _ALIKE and same,
    )
    return error < _ALIKE and same


def attention(ceilings: dict[str, float]) -> None:
    ways = attention_ways()
    right = check(ways, "attention", "attend")
    say("right", **right)
    for name, shape in (("decode", decode_shape()), ("prefill", prefill_shape())):
        builder = Builder(shape)
        builder.attention()
        works = [work for work in builder.work if work.name.startswith("attention")]
        time_ways(name, works, ways, ceilings)
        del builder, works
        torch.cuda.empty_cache()


def index(ceilings: dict[str, float]) -> None:
    ways = index_ways()
    right = check(ways, "index", "score")
    say("right", **right)
    for name, shape in (("decode", decode_shape()), ("prefill", prefill_shape())):
        builder = Builder(shape)
        builder.indexer()
        works = [work for work in builder.work if "scores" in work.name and "select" not in work.name]
        time_ways(name, works, ways, ceilings)
        del builder, works
        torch.cuda.empty_cache()


PARTS = {"attention": attention, "index": index}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(PARTS), action="append")
    asked = parser.parse_args()
    with torch.inference_mode():
        ceilings = yardsticks()
        say("machine", machine=machine(), **{name: round(value, 9) for name, value in ceilings.items()})
        for name in asked.only or PARTS:
            survives(name, lambda: PARTS[name](ceilings) is None)  # noqa: B023 - as above


if __name__ == "__main__":
    main()
