"""How many bytes and operations must a step cost, counted from shapes, and how long would a perfect machine take?

    python -m bench.roofline --model llama-8b --batch 64 --context 1024     # per kernel, no GPU needed

Inputs are read once, outputs written once; weights once a step. Floors use bandwidth and arithmetic as measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass

from bench.gpu_shapes import GPU_SHAPES
from kernels.models.config import ModelConfig, parse_config

_BF16, _FP32 = 2, 4
NOMINAL = {"copy_bytes_per_second": 4.26e12, "read_bytes_per_second": 4.26e12, "gemm_flops": 7.05e11 * 1e3}
"""One H200, measured."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's work in a step, over all layers."""

    name: str
    num_bytes: float
    flops: float = 0.0

    def floor_seconds(self, ceilings: Mapping[str, float]) -> float:
        """The larger of the times its bytes and its operations take."""
        return max(self.num_bytes / ceilings["copy_bytes_per_second"], self.flops / ceilings["gemm_flops"])


@dataclass(frozen=True, slots=True)
class Work:
    """A step."""

    kernels: tuple[Kernel, ...]

    def floor_seconds(self, ceilings: Mapping[str, float]) -> float:
        """No overlap between what waits for memory and what computes: the sum of the kernels' floors."""
        return sum(kernel.floor_seconds(ceilings) for kernel in self.kernels)


def decode_work(config: ModelConfig, batch: int, context: int) -> Work:
    """One token for each of `batch` sequences of `context` tokens."""
    return _work(config, batch, keys=float(batch * context), pairs=float(batch * context), wanted=batch)


def prefill_work(config: ModelConfig, batch: int, context: int) -> Work:
    """`batch` whole prompts of `context` tokens; their keys are read once, and only last tokens reach the head."""
    tokens = batch * context
    return _work(config, tokens, keys=float(tokens), pairs=batch * context * (context + 1) / 2, wanted=batch)


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
        )

    return Work(
        (
            product("qkv", queries + 2 * cached, hidden, layers),
            Kernel("rope and store", layers * tokens * 2.0 * (queries + 2 * cached) * _BF16),
            Kernel(
                "attention", layers * _BF16 * (2 * keys * cached + 2 * tokens * queries), inner * 4.0 * pairs * queries
            ),
            product("output", hidden, queries, inner),
            product("gate and up", 2 * ffn, hidden, inner),
            Kernel("swiglu", inner * tokens * 3.0 * ffn * _BF16 if tokens > 64 else 0.0),
            product("down", hidden, ffn, inner),
            Kernel("norms", (layers + inner) * tokens * 4.0 * hidden * _BF16),
            product("head", config.vocab_size, hidden, 1, _FP32, wanted),
            Kernel("sampler", wanted * config.vocab_size * float(_FP32)),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(GPU_SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", action="store_true")
    asked = parser.parse_args()
    config = parse_config(GPU_SHAPES[asked.model], {})
    work = (prefill_work if asked.prefill else decode_work)(config, asked.batch, asked.context)
    for kernel in work.kernels:
        floor = kernel.floor_seconds(NOMINAL)
        bound = "bytes" if floor * NOMINAL["copy_bytes_per_second"] <= kernel.num_bytes * 1.0001 else "operations"
        line = {"kernel": kernel.name, "bytes": kernel.num_bytes, "flops": kernel.flops}
        print(json.dumps(line | {"floor_us": round(floor * 1e6, 1), "bound": bound}))
    print(json.dumps({"kernel": "all", "floor_us": round(work.floor_seconds(NOMINAL) * 1e6, 1)}))


if __name__ == "__main__":
    main()
