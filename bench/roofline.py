"""How many bytes and operations must a step cost, counted from shapes, and how long would a perfect machine take?

    python -m bench.roofline --model llama-8b --batch 64 --context 1024     # also: smollm2-135m, v41; --prefill

About a minute with a GPU, at once without. Prints each kernel's floor; where there is a GPU, also the time of each
kernel by itself and its share of the limit; with --json each as it is timed. Inputs are read once, outputs written
once; weights once a step. Floors use bandwidth and arithmetic as measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.gpu_shapes import GPU_SHAPES
from kernels.models.config import ModelConfig, parse_config

_BF16, _FP32 = 2, 4
NOMINAL = {"copy_bytes_per_second": 4.26e12, "gemm_flops": 7.05e14, "host_bytes_per_second": 5.5e10}
"""One H200, measured."""


FP8_OVER_BF16 = 1340 / 705
"""Rates of the library's row-scaled fp8 product and of its bf16 product, measured on an H200 at 8192^3."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's (or library call's) work in a step, over all layers."""

    name: str
    num_bytes: float
    flops: float = 0.0
    count: int = 1
    """Calls in a step."""
    is_fp8: bool = False
    """Its operations may run on the fp8 units: the floor takes their rate."""
    host_bytes: float = 0.0
    """Of its bytes, those that come from the host's memory."""

    def floor_seconds(self, ceilings: Mapping[str, float]) -> float:
        """The largest of the times its bytes, its operations and what it fetches from the host take."""
        rate = ceilings["gemm_flops"] * (FP8_OVER_BF16 if self.is_fp8 else 1.0)
        fetching = self.host_bytes / ceilings.get("host_bytes_per_second", math.inf)
        return max(self.num_bytes / ceilings["copy_bytes_per_second"], self.flops / rate, fetching)

    def waits_for(self, ceilings: Mapping[str, float]) -> str:
        """What its floor is made of."""
        floor = self.floor_seconds(ceilings)
        if self.num_bytes / ceilings["copy_bytes_per_second"] >= floor:
            return "bytes"
        return "host" if self.host_bytes / ceilings.get("host_bytes_per_second", math.inf) >= floor else "operations"


@dataclass(frozen=True, slots=True)
class Work:
    """A step."""

    kernels: tuple[Kernel, ...]

    def floor_seconds(self, ceilings: Mapping[str, float]) -> float:
        """No overlap between what waits for memory and what computes: the sum of the kernels' floors."""
        return sum(kernel.floor_seconds(ceilings) for kernel in self.kernels)

    @property
    def num_bytes(self) -> float:
        return sum(kernel.num_bytes for kernel in self.kernels)

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)


def decode_work(config: ModelConfig, batch: int, context: int, *, window: int = 0) -> Work:
    """One token for each of `batch` sequences of `context` tokens.  window: newest that attention sees, 0 for all."""
    keys = float(batch * (min(context, window) if window else context))
    return _work(config, batch, keys=keys, pairs=keys, wanted=batch)


def prefill_work(config: ModelConfig, batch: int, context: int, *, window: int = 0) -> Work:
    """`batch` whole prompts of `context` tokens; their keys are read once, and only last tokens reach the head."""
    tokens, seen = batch * context, min(context, window or context)
    pairs = batch * (seen * (seen + 1) / 2 + (context - seen) * seen)
    return _work(config, tokens, keys=float(tokens), pairs=pairs, wanted=batch)


def _work(config: ModelConfig, tokens: int, *, keys: float, pairs: float, wanted: int) -> Work:
    """keys: cached tokens read.  pairs: query tokens x keys they see.  Only wanted tokens leave the last layer."""
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    queries, cached = config.num_heads * dim, config.num_kv_heads * dim
    layers, inner = config.num_layers, config.num_layers - 1 + wanted / tokens

    def product(
        name: str, columns: int, depth: int, times: float, out_bytes: int = _BF16, rows: float = tokens
    ) -> Kernel:
        weights = columns * depth * _BF16 * (layers if times > 1 else 1)
        return Kernel(
            name,
            weights + times * rows * (depth * _BF16 + columns * out_bytes),
            2.0 * times * rows * columns * depth,
            layers if times > 1 else 1,
        )

    moved = layers * _BF16 * (2 * keys * cached + 2 * tokens * queries)
    return Work(
        (
            Kernel("embedding", tokens * 2.0 * hidden * _BF16),
            product("qkv", queries + 2 * cached, hidden, layers),
            Kernel("rope and store", layers * tokens * 2.0 * (queries + 2 * cached) * _BF16, count=layers),
            Kernel("attention", moved, inner * 4.0 * pairs * queries, layers),
            product("output", hidden, queries, inner),
            product("gate and up", 2 * ffn, hidden, inner),
            Kernel("swiglu", inner * tokens * 3.0 * ffn * _BF16 if tokens > FUSED_ROWS else 0.0, count=layers),
            product("down", hidden, ffn, inner),
            Kernel("norms", (layers + inner) * tokens * 4.0 * hidden * _BF16, count=2 * layers + 1),
            product("head", config.vocab_size, hidden, 1, _FP32, wanted),
            Kernel("sampler", wanted * config.vocab_size * float(_FP32)),
        )
    )


FUSED_ROWS = 64
"""Up to so many rows gate, up and SwiGLU are one kernel: what lies between them is not moved."""


def lines(step: str, work: Work, ceilings: Mapping[str, float], took: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """What to print of each kernel, and of the step.  took: seconds of one call, of those that were timed."""
    for kernel in work.kernels:
        floor = kernel.floor_seconds(ceilings)
        line = {
            "step": step,
            "kernel": kernel.name,
            "times": kernel.count,
            "bytes": kernel.num_bytes,
            "flops": kernel.flops,
            "bound": kernel.waits_for(ceilings),
            "floor_us": round(floor / kernel.count * 1e6, 2),
        }
        if kernel.name in took:
            seconds = took[kernel.name] * kernel.count
            line |= {
                "us": round(took[kernel.name] * 1e6, 2),
                "of_limit": round(floor / seconds, 3),
                "gbps": round(kernel.num_bytes / seconds / 1e9),
                "tflops": round(kernel.flops / seconds / 1e12, 1),
            }
        yield line
    floor = work.floor_seconds(ceilings)
    line = {"step": step, "kernel": "all", "floor_us": round(floor * 1e6, 1)}
    if all(kernel.name in took for kernel in work.kernels if kernel.num_bytes):
        seconds = sum(took[kernel.name] * kernel.count for kernel in work.kernels if kernel.num_bytes)
        line |= {"us": round(seconds * 1e6, 1), "of_limit": round(floor / seconds, 3)}
    yield line


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The same, to be read."""
    said = [f"{'kernel':<24}{'times':>6}{'floor us':>11}{'us':>11}{'of limit':>10}{'GB/s':>7}{'TFLOP/s':>9}  bound"]
    for row in rows:
        cells = [f"{row[name]:,}" if name in row else "" for name in ("times", "floor_us", "us")]
        share = f"{100 * row['of_limit']:.0f} %" if "of_limit" in row else ""
        rates = [str(row.get(name, "")) for name in ("gbps", "tflops")]
        said.append(
            f"{row['kernel']:<24}{cells[0]:>6}{cells[1]:>11}{cells[2]:>11}{share:>10}{rates[0]:>7}{rates[1]:>9}"
            f"  {row.get('bound', '')}"
        )
    return "\n".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*sorted(GPU_SHAPES), "v41"], default="llama-8b")
    parser.add_argument("--batch", type=int, default=64, help="of dense models")
    parser.add_argument("--context", type=int, default=1024, help="of dense models")
    parser.add_argument("--window", type=int, default=0, help="newest positions that a dense model's attention sees")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--json", action="store_true", help="a line for each kernel instead of a table")
    asked = parser.parse_args()
    work, step = work_of(asked.model, asked.batch, asked.context, window=asked.window, prefill=asked.prefill)
    ceilings, took = dict(NOMINAL), dict[str, float]()
    if has_gpu():
        from bench.gpu_time import machine, yardsticks
        from bench.roofline_calls import timed

        ceilings = yardsticks()
        print(json.dumps({"machine": machine(), **ceilings}), flush=True)
        for name, seconds in timed(asked.model, asked.batch, asked.context, window=asked.window, prefill=asked.prefill):
            took[name] = seconds
            if asked.json:  # as it is known
                print(json.dumps({"kernel": name, "us": round(seconds * 1e6, 2)}), flush=True)
    else:
        print("no GPU here: floors alone, of an H200 as it was measured", file=sys.stderr)
    rows = list(lines(step, work, ceilings, took))
    print("\n".join(map(json.dumps, rows)) if asked.json else f"{step}\n{table(rows)}")
    missing = [kernel.name for kernel in work.kernels if kernel.num_bytes and kernel.name not in took]
    return int(bool(took) and bool(missing))


def work_of(model: str, batch: int, context: int, *, window: int, prefill: bool) -> tuple[Work, str]:
    """A step of a model, and what to call it."""
    if model == "v41":
        from bench.gpu_v41_work import decode_shape, prefill_shape
        from bench.roofline_v41 import v41_work

        return v41_work(prefill_shape() if prefill else decode_shape()), f"v41 {'prefill' if prefill else 'decode'}"
    config = parse_config(GPU_SHAPES[model], {})
    kind = "prefill" if prefill else "decode"
    made = (prefill_work if prefill else decode_work)(config, batch, context, window=window)
    return made, f"{model} {kind}, {batch} x {context:,}" + (f", windows of {window:,}" if window else "")


def has_gpu() -> bool:
    """Asked late: counting needs no torch."""
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
