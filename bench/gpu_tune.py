"""Which tiles are fastest on this GPU? What the frozen tables in kernels/ops/gpu_linear.py were chosen from.

python -m bench.gpu_tune          # some minutes; a line for each shape as it is known
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.gpu_check import LLAMA, SMOL, bf16, paged
from bench.gpu_time import graph_seconds, machine, yardsticks
from kernels.ops.gpu_attention import Shape, attend, tokens_per_tile
from kernels.ops.gpu_linear import Tile, library_linear, linear, linear_swiglu
from kernels.ops.gpu_rope_cache import Paging

FEW = (
    Tile(64, 32, 128, 4, 5),
    Tile(64, 16, 128, 4, 6),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 32, 256, 4, 3),
    Tile(16, 32, 128, 4, 6),
    Tile(16, 32, 256, 4, 4),
    Tile(16, 16, 256, 4, 5),
    Tile(16, 64, 128, 4, 5),
)
SOME = (
    Tile(64, 128, 64, 4, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 4),
    Tile(256, 64, 64, 8, 4),
    Tile(256, 128, 64, 8, 3),
    Tile(128, 256, 64, 8, 3),
)
MANY = (Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 4, 4))
SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "smol gate_up": (3072, 576),
    "smol down": (576, 1536),
}
_COLD_BYTES = 200 << 20


def rotating(x: Tensor, weights: list[Tensor], call: Callable[..., object]) -> float:
    return graph_seconds([partial(call, x, weight) for weight in weights], repeats=5)


def tune_linear(rows: int, tiles: tuple[Tile, ...], names: tuple[str, ...]) -> None:
    for name in names:
        columns, depth = SHAPES[name]
        copies = max(2, min(32, _COLD_BYTES // (columns * depth * 2) + 1))
        weights = [bf16(columns, depth, scale=depth**-0.5) for _ in range(copies)]
        x = bf16(rows, depth)
        taken = {"library": rotating(x, weights, library_linear)}
        for tile in tiles:
            label = f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
            try:
                taken[label] = rotating(x, weights, partial(linear, tile=tile))
                if name == "gate_up" and tile.columns <= 128 and tile.rows * tile.columns < 128 * 256:
                    taken["gated " + label] = rotating(x, weights, partial(linear_swiglu, tile=tile))
            except Exception as problem:  # noqa: BLE001 - a tile too large for shared memory is a result
                taken[label] = float("nan")
                print(json.dumps({"tile": label, "problem": str(problem)[:100]}))
        best = sorted(taken.items(), key=lambda each: each[1])
        line = {
            "linear": name,
            "rows": rows,
            "gbytes": columns * depth * 2 / 1e9,
            "gflop": 2 * rows * columns * depth / 1e9,
        }
        print(json.dumps(line | {label: round(seconds * 1e6, 2) for label, seconds in best}), flush=True)
        del weights


def tune_attention() -> None:
    for heads, cases in (
        (LLAMA, ((256, 1024, (1,)), (64, 1024, (1, 2)), (8, 8192, (2, 4, 8, 16)), (1, 1024, (4, 8, 32)))),
        (SMOL, ((256, 512, (1,)), (64, 512, (1, 2)), (1, 512, (1, 2, 4, 8)))),
    ):
        for batch, context, splits in cases:
            place = paged(heads, batch, -(-context // 128))
            copies = [place] + [Paging(place.layer.clone(), place.tables) for _ in range(1 if batch > 32 else 3)]
            queries = bf16(batch, heads.num_heads * heads.head_dim)
            tiles = torch.tensor([(i + 1, i, 1, context - 1) for i in range(batch)], dtype=torch.int32, device="cuda")
            taken = {}
            for shape in (
                Shape(64, 4, 2),
                Shape(64, 4, 3),
                Shape(64, 4, 4),
                Shape(16, 4, 3),
                Shape(16, 2, 3),
                Shape(16, 2, 4),
            ):
                for n in splits:
                    calls = [partial(attend, queries, tiles, heads, each, splits=n, shape=shape) for each in copies * 2]
                    taken[f"{shape.rows}w{shape.warps}s{shape.stages} x{n}"] = graph_seconds(calls, repeats=5)
            size = batch * context * 2 * heads.num_kv_heads * heads.head_dim * 2
            best = sorted(taken.items(), key=lambda each: each[1])
            line = {"attention": f"{heads.head_dim} decode", "batch": batch, "context": context, "gbytes": size / 1e9}
            line |= {"best_tb_per_second": round(size / best[0][1] / 1e12, 3)}
            print(json.dumps(line | {label: round(seconds * 1e6, 2) for label, seconds in best}), flush=True)
        place = paged(heads, 16, 8)
        queries = bf16(16384, heads.num_heads * heads.head_dim)
        taken = {}
        for shape in (Shape(64, 4, 2), Shape(64, 4, 3), Shape(128, 8, 2), Shape(128, 8, 3), Shape(128, 4, 2)):
            most = tokens_per_tile(heads, shape)
            rows = [
                (line + 1, line * 1024 + at, min(most, 1024 - at), at)
                for line in range(16)
                for at in range(0, 1024, most)
            ]
            rows.sort(key=lambda each: -each[3])
            tiles = torch.tensor(rows, dtype=torch.int32, device="cuda")
            taken[f"{shape.rows}w{shape.warps}s{shape.stages}"] = graph_seconds(
                [partial(attend, queries, tiles, heads, place, shape=shape)] * 2, repeats=5
            )
        flops = 16 * 1024 * 1025 / 2 * 4 * heads.num_heads * heads.head_dim
        line = {
            "attention": f"{heads.head_dim} prefill",
            "tflop_per_second": round(flops / min(taken.values()) / 1e12, 1),
        }
        print(json.dumps(line | {label: round(seconds * 1e6, 1) for label, seconds in taken.items()}), flush=True)


def main() -> int:
    print(json.dumps({"machine": machine(), **yardsticks()}), flush=True)
    tune_attention()
    names = ("qkv", "output", "gate_up", "down", "head", "smol gate_up", "smol down")
    tune_linear(1, FEW, names)
    tune_linear(64, FEW[:5], names)
    tune_linear(256, SOME, names[:4])
    tune_linear(8192, MANY, ("gate_up", "down"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
