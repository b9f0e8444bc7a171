"""Which of V4.1's ways that are switched off make a whole step faster on this GPU, and do they compute the same?

    python -m bench.gpu_v41_step_ways                          # decode and prefill, as it is and with each way
    python -m bench.gpu_v41_step_ways decode --profile         # and what each kernel of a step takes, in the step
    python -m bench.gpu_v41_step_ways prefill --ways Triton

Weights are made once; for each way the step is captured anew. Its logits are compared with those of the step as it is:
ways must give the same bits, unless they are known to round otherwise. One JSON line for each.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu_time import machine, yardsticks
from bench.gpu_v41 import check_case
from bench.gpu_v41_attention import Way, in_force, poisoned
from bench.gpu_v41_cases import FAMILIES, Draw
from bench.gpu_v41_model import give_past, published_config
from bench.gpu_v41_step import (
    chunk,
    decode_model,
    decode_weights,
    drafts_step,
    executor_of,
    prefill_model,
    prefill_weights,
    took_by,
)
from bench.gpu_v41_work import decode_shape
from kernels.batch import Batch
from kernels.models.gpu.v41.model import GpuV41
from kernels.ops import (
    gpu_fp8,
    gpu_grouped_packed,
    gpu_hyper,
    gpu_index,
    gpu_placed_rows,
    gpu_sparse,
    gpu_swiglu_rows,
)

STREAMS: Way = {(gpu_hyper, "BY_ROWS"): True}
OWN_DENSE: Way = {(gpu_fp8, "OWN_DENSE"): True}
SAME_BITS: dict[str, Way] = {
    "chosen by words": {(gpu_index, "BY_WORDS"): True},
    "rows placed in one": {(gpu_placed_rows, "IN_ONE"): True},
    "gated whole": {(gpu_swiglu_rows, "WHOLE"): True},
    "experts' programs stay": {(gpu_grouped_packed, "MOST_ROUNDS"): 8},
}
_ALIKE: Way = {place: value for way in SAME_BITS.values() for place, value in way.items()}
WAYS: dict[str, Way] = {
    "as it is": {},
    "all of the same bits": _ALIKE,
    "all": _ALIKE | STREAMS | OWN_DENSE,
    "streams by rows": STREAMS,
    "wq_b by our own kernel": OWN_DENSE,
    **SAME_BITS,
    "attention in Triton": {(gpu_sparse, "_fits_hopper"): lambda *_: False},
}
"""What each sets, most worth first; a new one is one line."""
ROUNDED_OTHERWISE = frozenset({"attention in Triton", "streams by rows", "wq_b by our own kernel", "all"})
"""Ways whose values may differ in a last bit."""
CHECKED = frozenset({"streams by rows", "all"})
"""Of these a step says little, as one expert chosen otherwise changes it: compared with the CPU's twin as well."""
_PROFILED = 3
_NAME = 96


def time_ways(
    step: str,
    build: Callable[[], tuple[GpuV41, Batch]],
    before: Callable[[GpuV41], Callable[[], None]],
    wanted: re.Pattern[str],
    *,
    profiles: bool,
) -> list[dict[str, Any]]:
    """before: what a model's step is preceded by.  Lines as they are said."""
    lines, expected = [], None
    for name, way in WAYS.items():
        if way and not wanted.search(name):
            continue
        try:
            with in_force(way):
                right = {"right": _streams_are_right()} if name in CHECKED else {}
                line, logits = time_way(build, before, profiles=profiles)
                line |= right
        except Exception as error:  # noqa: BLE001 - said, and the next is timed
            line, logits = {"failed": f"{type(error).__name__}: {str(error)[-400:]}"}, None
            traceback.print_exc(limit=6, file=sys.stderr)
        if logits is not None:
            expected = logits if expected is None else expected
            line |= _beside(expected, logits)
            line["passed"] = (line["error"] == 0.0 or name in ROUNDED_OTHERWISE) and line.get("right", True)
        lines.append({"figure": f"{step} step", "way": name} | line)
        print(json.dumps(lines[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return lines


def time_way(
    build: Callable[[], tuple[GpuV41, Batch]], before: Callable[[GpuV41], Callable[[], None]], *, profiles: bool
) -> tuple[dict[str, Any], Tensor]:
    """Milliseconds, and logits of the first step."""
    torch.manual_seed(1)
    model, batch = build()
    executor = executor_of(model)  # warms up, and leaves windows empty
    begin = before(model)
    begin()
    logits = model.forward(batch, every_row=True).clone()
    took = took_by(executor, batch, before=begin)
    if profiles:
        took["kernels"] = _kernels(lambda: (begin(), executor.launch(batch)))
    return took, logits


def _streams_are_right() -> bool:
    """From one sublayer into the next by the way that is in force, at real dimensions."""
    cases = [case for case in FAMILIES["streams"](Draw(1)) if case.name.startswith("enter") and not case.named]
    with poisoned():
        return all(
            list(map(check_case, (replace(case, named={"restates": True}) for case in cases)))
        )  # each says its own


def _beside(expected: Tensor, got: Tensor) -> dict[str, Any]:
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    same = float((got.argmax(1) == expected.argmax(1)).float().mean())
    return {"error": error, "same_tokens": round(same, 4)}


def _kernels(launch: Callable[[], object]) -> list[dict[str, Any]]:
    """What a step's kernels take in it, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(_PROFILED):
            launch()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda each: -each.device_time_total)
    return [
        {
            "kernel": each.key[:_NAME],
            "launches": round(each.count / _PROFILED, 1),
            "us": round(each.device_time_total / _PROFILED, 1),
        }
        for each in rows
        if each.device_time_total
    ]


def decode(wanted: re.Pattern[str], *, profiles: bool) -> list[dict[str, Any]]:
    """64 requests of four rows at 131,072 tokens."""
    config, shape = published_config(), decode_shape()
    weights = decode_weights(config, is_invariant=False)
    each = shape.tokens // shape.requests
    batch = drafts_step(config, requests=shape.requests, each=each, context=shape.context)

    def build() -> tuple[GpuV41, Batch]:
        return decode_model(config, weights, is_invariant=False), batch

    def before(model: GpuV41) -> Callable[[], None]:
        give_past(model)
        return lambda: None

    return time_ways("decode", build, before, wanted, profiles=profiles)


def prefill(wanted: re.Pattern[str], layers: int, *, profiles: bool) -> list[dict[str, Any]]:
    """A chunk of 16,384 through encoder layers."""
    config = published_config(layers, layers)
    weights = prefill_weights(config, is_invariant=False)

    def build() -> tuple[GpuV41, Batch]:
        return prefill_model(config, weights, is_invariant=False), chunk(config)

    return time_ways("prefill", build, lambda model: lambda: model.reset_window(1), wanted, profiles=profiles)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="decode, prefill; both otherwise")
    parser.add_argument("--ways", default="", help="regular expression; the step as it is comes first in any case")
    parser.add_argument("--profile", action="store_true", help="also time each kernel in the step")
    parser.add_argument("--layers", type=int, default=6, help="of prefill")
    parser.add_argument("--out", type=Path, help="folder for gpu_v41_step_ways.json")
    asked = parser.parse_args()
    wanted, ceilings = re.compile(asked.ways), yardsticks()
    print(json.dumps({"machine": machine(), **ceilings}), flush=True)
    lines: list[dict[str, Any]] = []
    if "decode" in asked.steps or not asked.steps:
        lines += decode(wanted, profiles=asked.profile)
    if "prefill" in asked.steps or not asked.steps:
        lines += prefill(wanted, asked.layers, profiles=asked.profile)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        document = {
            "machine": machine(),
            "command": "python -m bench.gpu_v41_step_ways",
            "yardsticks": ceilings,
            "figures": lines,
        }
        (asked.out / "gpu_v41_step_ways.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(not all(line.get("passed") for line in lines))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
