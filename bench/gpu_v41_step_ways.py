"""What does another way to compute a part of V4.1 make of a whole step on this GPU, and does it compute the same?

    python -m bench.gpu_v41_step_ways                          # decode and prefill, as it is and with each way
    python -m bench.gpu_v41_step_ways decode --profile         # and what each kernel of a step takes, in the step
    python -m bench.gpu_v41_step_ways decode --invariant --profile --ways none     # the mode that is served, as it is
    python -m bench.gpu_v41_step_ways prefill --ways Triton

Weights are made once; for each way the step is captured anew. Its logits are compared with those of the step as it is:
ways must give the same bits, unless they are known to round otherwise. One JSON line for each.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu_time import machine, yardsticks
from bench.gpu_v41_attention import Way, in_force
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
from kernels.models.gpu.v41 import expert_weights, tokens
from kernels.models.gpu.v41.model import GpuV41
from kernels.models.gpu.v41.weights import GpuV41Weights, LayerWeights
from kernels.ops import gpu_bring, gpu_dense_fp8, gpu_overlap, gpu_sparse
from kernels.ops.gpu_grouped_unpack import Packed

WAYS: dict[str, Way] = {
    "as it is": {},
    **{f"{place} brought": {(gpu_bring, "PLACES"): frozenset({place})} for place in sorted(gpu_bring.ALL)},
    "all brought": {(gpu_bring, "PLACES"): gpu_bring.ALL},
    "those who sum ask": {(gpu_sparse, "SUMS_ASK"): True},
    "laid out by torch": {(tokens, "IS_TOLD_AT_ONCE"): False},
    "gates in the product": {(expert_weights, "GATES_IN_PRODUCT"): True},
    "nothing early": {(gpu_overlap, "_has_dependent_launch"): lambda _: False},
    "wq_b by the library": {(gpu_dense_fp8, "is_worth"): lambda *_: False},
    "attention in Triton": {(gpu_sparse, "_fits_hopper"): lambda *_: False},
}
"""What each sets, most worth first; a new one is one line."""
ROUNDED_OTHERWISE = frozenset({"gates in the product", "wq_b by the library", "attention in Triton"})
"""Ways whose values may differ in a last bit. A step says little of them: one expert chosen otherwise changes it."""
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
                line, logits = time_way(build, before, profiles=profiles)
        except Exception as error:  # noqa: BLE001 - said, and the next is timed
            line, logits = {"failed": f"{type(error).__name__}: {str(error)[-400:]}"}, None
            traceback.print_exc(limit=6, file=sys.stderr)
        if logits is not None:
            expected = logits if expected is None else expected
            line |= _beside(expected, logits)
            line["passed"] = line["error"] == 0.0 or name in ROUNDED_OTHERWISE
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


def _as_loaded(weights: GpuV41Weights) -> GpuV41Weights:
    """With experts as the way in force would load them: gate and up interleaved, in new memory, or as they lie."""
    if not expert_weights.GATES_IN_PRODUCT:
        return weights

    def changed(layer: LayerWeights) -> LayerWeights:
        up = layer.moe.up
        if not isinstance(up, Packed) or up.room is not None or up.is_interleaved:
            return layer
        return replace(layer, moe=replace(layer.moe, up=up.interleaved()))

    return replace(weights, layers=tuple(changed(layer) for layer in weights.layers))


def decode(wanted: re.Pattern[str], *, is_invariant: bool, profiles: bool) -> list[dict[str, Any]]:
    """64 requests of four rows at 131,072 tokens."""
    config, shape = published_config(), decode_shape()
    weights = decode_weights(config, is_invariant=is_invariant)
    each = shape.tokens // shape.requests
    batch = drafts_step(config, requests=shape.requests, each=each, context=shape.context)

    def build() -> tuple[GpuV41, Batch]:
        return decode_model(config, _as_loaded(weights), is_invariant=is_invariant), batch

    def before(model: GpuV41) -> Callable[[], None]:
        give_past(model)
        return lambda: None

    return time_ways(_named("decode", is_invariant=is_invariant), build, before, wanted, profiles=profiles)


def prefill(wanted: re.Pattern[str], layers: int, *, is_invariant: bool, profiles: bool) -> list[dict[str, Any]]:
    """A chunk of 16,384 through encoder layers."""
    config = published_config(layers, layers)
    weights = prefill_weights(config, is_invariant=is_invariant)

    def build() -> tuple[GpuV41, Batch]:
        return prefill_model(config, _as_loaded(weights), is_invariant=is_invariant), chunk(config)

    def before(model: GpuV41) -> Callable[[], None]:
        return lambda: model.reset_window(1)

    return time_ways(_named("prefill", is_invariant=is_invariant), build, before, wanted, profiles=profiles)


def _named(step: str, *, is_invariant: bool) -> str:
    return f"invariant {step}" if is_invariant else step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="decode, prefill; both otherwise")
    parser.add_argument("--ways", default="", help="regular expression; the step as it is comes first in any case")
    parser.add_argument("--invariant", action="store_true", help="the mode whose bits depend on no other token")
    parser.add_argument("--profile", action="store_true", help="also time each kernel in the step")
    parser.add_argument("--layers", type=int, default=6, help="of prefill")
    parser.add_argument("--out", type=Path, help="folder for gpu_v41_step_ways.json")
    asked = parser.parse_args()
    wanted, ceilings = re.compile(asked.ways), yardsticks()
    print(json.dumps({"machine": machine(), **ceilings}), flush=True)
    lines: list[dict[str, Any]] = []
    if "decode" in asked.steps or not asked.steps:
        lines += decode(wanted, is_invariant=asked.invariant, profiles=asked.profile)
    if "prefill" in asked.steps or not asked.steps:
        lines += prefill(wanted, asked.layers, is_invariant=asked.invariant, profiles=asked.profile)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        document = {
            "machine": machine(),
            "command": shlex.join(["python", "-m", "bench.gpu_v41_step_ways", *sys.argv[1:]]),
            "yardsticks": ceilings,
            "figures": lines,
        }
        (asked.out / "gpu_v41_step_ways.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(not all(line.get("passed") for line in lines))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
