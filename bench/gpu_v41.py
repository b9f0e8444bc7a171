"""Are the V4.1 kernels right on this GPU, how long does each take at real dimensions, and what would a step take?

    python -m bench.gpu_v41 check                 # every kernel against its twin, outputs poisoned, fresh inputs
    python -m bench.gpu_v41 decode                # one step, kernel by kernel, beside floors; also: prefill
    python -m bench.gpu_v41 experts               # cuts that docs/performance_v41.md froze; also: choice, dense
    python -m bench.gpu_v41 profile               # the kernels inside some ops
    python -m bench.gpu_v41 step                  # whole steps through the executor: measured, not added up

Checks take two and a half minutes, the others about one each, steps as bench/gpu_v41_step.py says. One JSON line per
figure. "decode" and "prefill" are sums of kernels measured one by one: extrapolated, and said so.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu_lines import Lines
from bench.gpu_time import graph_seconds, machine, yardsticks
from bench.gpu_v41_cases import FAMILIES, HIDDEN, Q_LORA, WIDTH, Case, Draw, moved
from bench.gpu_v41_step import time_steps
from bench.gpu_v41_work import Builder, Shape, Work, decode_shape, prefill_shape
from kernels.ops import gpu_hyper_rows, gpu_index
from kernels.ops.gpu_grouped import Format, Tile, fp8_weights
from kernels.ops.gpu_matmul import Fp8Tile, fp8_product
from kernels.ops.gpu_quant import quantise_rows
from kernels.ops.quant import quantise_fp8_weight

FP8_PEAK_OVER_BF16 = 1340 / 705
"""Of the library's row-scaled fp8 product over its bf16 product, measured on an H200 at 8192^3."""
DRAFT_ACCEPTANCE, DRAFTS = 0.75, 3
AT_LEAST = 24
"""Calls in a graph."""


def say(figure: str, **named: Any) -> None:
    print(json.dumps({"bench": "gpu_v41", "figure": figure, **named}), flush=True)


def results_of(case: Case, device: str) -> list[Tensor]:
    """What a case makes there, on the CPU."""
    args, named = moved(case.args, device), {name: moved(each, device) for name, each in case.named.items()}
    made = case.run(*args, **named)
    if case.writes is not None:
        return [args[case.writes].pool.cpu()]
    parts = [made] if isinstance(made, Tensor) else made if isinstance(made, tuple) else _fields(made)
    return [each.cpu() for each in parts]


def _fields(made: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for name in made.__slots__:
        value = getattr(made, name)
        if isinstance(value, Tensor):
            found.append(value)
        elif hasattr(value, "__slots__"):
            found += _fields(value)
    return found


def difference(expected: Tensor, got: Tensor) -> float:
    """Relative L2 error; of bytes, the share that differs. Infinite where one has a value and the other none."""
    if expected.dtype in {torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn}:
        a, b = (each.view(torch.uint8) if each.dtype == torch.float8_e4m3fn else each for each in (expected, got))
        return float((a != b).double().mean()) if a.numel() else 0.0
    a, b = expected.double(), got.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    finite = a.isfinite()
    return float((a[finite] - b[finite]).norm() / a[finite].norm().clamp_min(1e-30))


def check_case(case: Case) -> bool:
    expected, got = results_of(case, "cpu"), results_of(case, "cuda")
    if "select" in case.name or "score" in case.name:
        expected, got = _seen(case, expected), _seen(case, got)
    worst = max(
        difference(a if case.rows is None else a[case.rows], b if case.rows is None else b[case.rows])
        for a, b in zip(expected, got, strict=True)
    )
    again = results_of(case, "cuda")
    again = _seen(case, again) if "select" in case.name or "score" in case.name else again
    same = all(
        torch.equal(
            a.nan_to_num() if case.rows is None else a[case.rows], b.nan_to_num() if case.rows is None else b[case.rows]
        )
        if a.dtype != torch.float8_e4m3fn
        else torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(got, again, strict=True)
    )
    passed = worst <= case.tolerance and same
    say("check", case=case.name, error=worst, tolerance=case.tolerance, repeats_bit_equal=same, passed=passed)
    return passed


def _seen(case: Case, made: list[Tensor]) -> list[Tensor]:
    """Scores of entries that are seen; others are never written."""
    if not case.name.startswith("score ") or "select" in case.name:
        return made
    seen = case.args[4]
    hidden = [torch.arange(each.shape[1]) >= -(-seen[:, None] * each.shape[1] // made[0].shape[1]) for each in made]
    return [each.masked_fill(mask, 0.0) for each, mask in zip(made, hidden, strict=True)]


def check(families: Sequence[str], seed: int) -> bool:
    """Every case of some families. New memory is filled with NaN and the largest whole numbers first."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # a module class has it
    passed = True
    for family in families:
        for case in FAMILIES[family](Draw(seed)):
            try:
                passed &= check_case(case)
            except Exception as error:  # noqa: BLE001 - a kernel that fails must not hide the others
                say("check", case=case.name, passed=False, failed=f"{type(error).__name__}: {str(error)[-600:]}")
                traceback.print_exc(limit=4, file=sys.stdout)
                passed = False
    return passed


def floor_seconds(work: Work, ceilings: dict[str, float]) -> float:
    """The larger of what its bytes and its operations take."""
    rate = ceilings["gemm_flops"] * (FP8_PEAK_OVER_BF16 if work.is_fp8 else 1.0)
    return max(work.num_bytes / ceilings["copy_bytes_per_second"], work.flops / rate)


def time_work(step: str, works: Iterable[Work], ceilings: dict[str, float]) -> tuple[float, float]:
    """Say each kernel's time; return the step's sum and its floor, seconds."""
    total = floor = 0.0
    for work in works:
        try:
            # Many in a graph: launching it takes as long as a small kernel.
            took = graph_seconds(
                work.calls * max(AT_LEAST // len(work.calls), 1) if work.num_bytes < 1e9 else work.calls
            )
        except Exception as error:  # noqa: BLE001 - as above
            say("kernel", step=step, kernel=work.name, failed=f"{type(error).__name__}: {str(error)[-300:]}")
            continue
        least = floor_seconds(work, ceilings)
        total, floor = total + work.count * took, floor + work.count * least
        say(
            "kernel",
            step=step,
            kernel=work.name,
            times=work.count,
            us=round(took * 1e6, 1),
            floor_us=round(least * 1e6, 1),
            ratio=round(took / max(least, 1e-9), 2),
            step_ms=round(took * work.count * 1e3, 3),
            tflops=round(work.flops / took / 1e12, 1),
            gbps=round(work.num_bytes / took / 1e9),
        )
    return total, floor


def build(shape: Shape) -> Builder:
    """Works of a step; a group that cannot be made is said, and the others are there."""
    builder = Builder(shape)
    groups = [builder.streams, builder.attention, builder.experts, builder.compressor, builder.indexer, builder.memory]
    for make in groups if shape.is_prefill else [*groups, builder.head]:
        try:
            make()
        except Exception as error:  # noqa: BLE001 - as said
            say("works", group=make.__name__, failed=f"{type(error).__name__}: {str(error)[-300:]}")
            traceback.print_exc(limit=4, file=sys.stderr)
    return builder


def time_step(shape: Shape, ceilings: dict[str, float]) -> None:
    """Every kernel of a step by itself, and their sum."""
    name = "prefill" if shape.is_prefill else "decode"
    took, floor = time_work(name, build(shape).work, ceilings)
    tokens: float = shape.tokens
    if not shape.is_prefill:
        tokens = shape.requests * (1 + sum(DRAFT_ACCEPTANCE**draft for draft in range(1, DRAFTS + 1)))
    say(
        f"{name} step, extrapolated",
        ms=round(took * 1e3, 2),
        floor_ms=round(floor * 1e3, 2),
        ratio=round(took / floor, 2),
        tokens_per_second=round(tokens / took),
        requests=shape.requests,
        rows=shape.tokens,
        context=shape.context,
        layers=shape.layers,
    )


def time_choice(ceilings: dict[str, float]) -> None:
    """Cuts of the choice that counts through whole rows."""
    before = gpu_index.SELECT_STEP, gpu_index.SELECT_WARPS
    for step, warps in ((8192, 8), (16_384, 16), (4096, 4)):
        gpu_index.SELECT_STEP, gpu_index.SELECT_WARPS = step, warps
        builder = Builder(decode_shape())
        builder.indexer()
        works = [work for work in builder.work if work.name == "select blocks"]
        time_work(f"step {step}, warps {warps}", works, ceilings)
    gpu_index.SELECT_STEP, gpu_index.SELECT_WARPS = before


def time_streams(ceilings: dict[str, float]) -> None:
    """Cuts of the hyper-connections."""
    before = gpu_hyper_rows.COLUMNS, gpu_hyper_rows.WARPS
    for columns, warps in ((1024, 8), (1024, 4)):
        gpu_hyper_rows.COLUMNS, gpu_hyper_rows.WARPS = columns, warps
        for shape in (decode_shape(), prefill_shape()):
            builder = Builder(shape)
            builder.streams()
            time_work(f"{shape.tokens}, {columns} columns, {warps} warps", builder.work, ceilings)
    gpu_hyper_rows.COLUMNS, gpu_hyper_rows.WARPS = before


EXPERT_TILES: dict[Format, tuple[Tile, ...]] = {
    "fp4": (Tile(128, 128, 8, 3), Tile(256, 128, 8, 2), Tile(128, 256, 8, 2), Tile(128, 128, 4, 3)),
    "bf16": (Tile(128, 128, 8, 3), Tile(256, 128, 8, 2), Tile(128, 256, 8, 2)),
    "fp8": (Tile(128, 128, 8, 3), Tile(256, 128, 8, 2)),
}


def time_experts(ceilings: dict[str, float]) -> None:
    """Cuts of the experts' products, one rank's of a decode step; and the library's grouped product."""
    shape = decode_shape()
    for kind, cuts in EXPERT_TILES.items():
        builder = Builder(shape)
        builder.experts(kind, cuts)
        time_work("cuts", [work for work in builder.work if work.name.startswith("experts")], ceilings)
    ends = torch.arange(1, shape.experts + 1, device="cuda", dtype=torch.int32) * (shape.rows // shape.experts)
    for out, size in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        x = torch.randn(int(ends[-1]), size, device="cuda").bfloat16()
        wide = [torch.randn(shape.experts, out, size, device="cuda").bfloat16() for _ in range(3)]
        calls = [lambda each=each: torch._grouped_mm(x, each.transpose(1, 2), offs=ends) for each in wide]  # noqa: B023, SLF001 - called at once; no public name in torch 2.11
        took = graph_seconds(calls)
        flops = 2.0 * len(x) * out * size
        say("library grouped", out=out, depth=size, us=round(took * 1e6, 1), tflops=round(flops / took / 1e12, 1))


FP8_TILES = (Fp8Tile(128, 128, 8, 5), Fp8Tile(128, 256, 8, 4), Fp8Tile(64, 256, 4, 5), Fp8Tile(128, 128, 4, 5))


def time_dense() -> None:
    """The library's bf16 product beside the fp8 units with a scale for every 32."""
    for tokens, out, size in ((256, 32_768, Q_LORA), (256, HIDDEN, 8192), (4096, HIDDEN, 8192)):
        data, scale = quantise_fp8_weight(torch.randn(out, size, device="cuda") * 0.02)
        weights = fp8_weights(data[None], scale[None])
        x, wide = (torch.randn(each, size, device="cuda").bfloat16() for each in (tokens, out))
        rows, flops = quantise_rows(x), 2.0 * tokens * out * size
        library = graph_seconds([lambda: torch.mm(x, wide.t())] * 8)  # noqa: B023 - called at once
        say("dense", rows=tokens, out=out, depth=size, kernel="library bf16", tflops=round(flops / library / 1e12))
        for tile in FP8_TILES:
            took = graph_seconds([lambda: fp8_product(*rows, weights, tile=tile)] * 8)  # noqa: B023 - as above
            say("dense", rows=tokens, out=out, depth=size, kernel=str(tile), tflops=round(flops / took / 1e12))


def profile_streams() -> None:
    """The kernels inside mhc, and of grouping, one by one."""
    builder = Builder(decode_shape())
    builder.streams()
    builder.experts("fp4")
    for work in builder.work:
        if work.name in {"mhc", "group"}:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for _ in range(5):
                    for call in work.calls:
                        call()
                torch.cuda.synchronize()
            for each in seen.key_averages():
                say("profile", work=work.name, kernel=each.key[:60], us=round(each.device_time, 1), calls=each.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=("check", "decode", "prefill", "step", "choice", "streams", "experts", "dense", "profile"),
    )
    parser.add_argument("--modes", nargs="*", default=["fastest", "invariant"], help="of step")
    parser.add_argument(
        "--layers", type=int, default=14, help="of step's prefill: the encoder has 20, 14 fit in 141 GB"
    )
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with torch.inference_mode():
        if asked.what == "check":
            say("machine", machine=machine())
            sys.exit(0 if check(asked.families, asked.seed) else 1)
        ceilings = yardsticks()
        say("machine", machine=machine(), **{name: round(value, 9) for name, value in ceilings.items()})
        if asked.what in {"decode", "prefill"}:
            time_step(decode_shape() if asked.what == "decode" else prefill_shape(), ceilings)
        elif asked.what == "step":
            time_steps(Lines(), ceilings, modes=asked.modes, layers=asked.layers)
        elif asked.what == "dense":
            time_dense()
        elif asked.what == "profile":
            profile_streams()
        else:
            cuts = {"choice": time_choice, "streams": time_streams, "experts": time_experts}
            cuts[asked.what](ceilings)


if __name__ == "__main__":
    main()
