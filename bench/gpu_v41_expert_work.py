"""What do V4.1's routed experts ask of one GPU, in the ways that the product has and by other formats and tiles?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.gpu_v41_cases import HIDDEN, LIMIT, WIDTH
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, gathered, grouped_product, span_rows
from kernels.ops.gpu_grouped import Format, Groups, Tile, Weights, multiply, multiply_gated
from kernels.ops.gpu_grouped_unpack import Packed, powers_of
from kernels.ops.gpu_swiglu_rows import swiglu_rows

if TYPE_CHECKING:
    from bench.gpu_v41_work import Builder

CUDA = torch.device("cuda")


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).bfloat16()


def random_weights(kind: Format, experts: int, out: int, size: int) -> Weights:
    """Random bytes are fp4 pairs; fp8 takes those that are no NaN."""
    if kind == "bf16":
        none = torch.empty(0, dtype=torch.uint8, device=CUDA)
        return Weights(kind, torch.randn(experts, out, size, device=CUDA, dtype=torch.bfloat16).mul_(0.02), none, size)
    if kind == "fp4":
        data = torch.randint(0, 256, (experts, out, size // 2), dtype=torch.uint8, device=CUDA)
        return Weights(kind, data, _exponents(experts, out, size // 32), size)
    data = torch.randint(0, 0x78, (experts, out, size), dtype=torch.uint8, device=CUDA)
    data |= torch.randint(0, 2, data.shape, dtype=torch.uint8, device=CUDA) << 7
    return Weights(kind, data, _exponents(experts, out // 32, size // 32), size)


def random_e4m3(experts: int, out: int, size: int) -> RowScaled:
    """Random values of small magnitude."""
    data = torch.randn(experts, out, size, device=CUDA, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return RowScaled(data, torch.full((experts, out), 2.0**-6, device=CUDA))


def _exponents(*shape: int) -> Tensor:
    return torch.randint(117, 120, shape, dtype=torch.uint8, device=CUDA)


def restated_experts(builder: Builder, groups: Groups, x: Tensor, factors: Tensor) -> None:
    """By the library: e4m3 in memory, or unpacked there first."""
    shape, layers, rows = builder.shape, builder.shape.layers, len(factors)
    wide = span_rows(x)
    hidden = span_rows(noise(rows, WIDTH))
    kind = "fp4, unpacked" if shape.is_prefill else "fp8"
    sizes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    up: Sequence[RowScaled | Packed]
    down: Sequence[RowScaled | Packed]
    if shape.is_prefill:
        room = torch.empty(shape.experts * 2 * WIDTH * HIDDEN, dtype=torch.uint8, device=CUDA)
        packed = [random_weights("fp4", shape.experts, *size) for size in sizes]
        both_packed = [Packed(each, powers_of(each), room) for each in packed]
        up, down = [both_packed[0]], [both_packed[1]]
    else:
        up, down = ([random_e4m3(shape.experts, *size) for _ in range(shape.copies)] for size in sizes)

    def ready(weights: RowScaled | Packed) -> RowScaled:
        return weights.unpacked() if isinstance(weights, Packed) else weights

    def gated(weights: RowScaled | Packed) -> Callable[[], object]:
        def call() -> SpanRows:
            made = grouped_product(gathered(wide, groups.sources), ready(weights), groups.ends)
            return swiglu_rows(made, groups.targets, factors, limit=LIMIT)

        return call

    stored, flops = shape.experts * 2 * WIDTH * HIDDEN * 17 // 32, 4.0 * rows * WIDTH * HIDDEN
    moved = 2.0 * rows * (HIDDEN + WIDTH)
    builder.add(f"experts up {kind}", layers, [gated(each) for each in up], stored + moved, flops, is_fp8=True)

    def plain(weights: RowScaled | Packed) -> Callable[[], object]:
        return lambda: grouped_product(hidden, ready(weights), groups.ends)

    calls = [plain(each) for each in down]
    builder.add(f"experts down {kind}", layers, calls, stored / 2 + moved, flops / 2, is_fp8=True)


def plain_experts(
    builder: Builder, kind: Format, tiles: tuple[Tile | None, ...], groups: Groups, x: Tensor, factors: Tensor
) -> None:
    shape, layers, rows = builder.shape, builder.shape.layers, len(factors)
    hidden, straight = noise(rows, WIDTH), replace(groups, sources=groups.targets)
    up = [random_weights(kind, shape.experts, 2 * WIDTH, HIDDEN) for _ in range(shape.copies)]
    down = [random_weights(kind, shape.experts, HIDDEN, WIDTH) for _ in range(shape.copies)]

    def gated(weights: Weights, tile: Tile | None) -> Callable[[], object]:
        return lambda: multiply_gated(x, weights, groups, factors, limit=LIMIT, num_out=rows, tile=tile)

    def plain(weights: Weights, tile: Tile | None) -> Callable[[], object]:
        return lambda: multiply(hidden, weights, straight, num_out=rows, tile=tile)

    for tile in tiles:
        name = kind if tile is None else f"{kind} {tile.rows}x{tile.outs} w{tile.warps} s{tile.stages}"
        stored = up[0].num_bytes if kind == "fp4" else shape.experts * 2 * WIDTH * HIDDEN * 17 // 32
        moved = stored + 2.0 * rows * (HIDDEN + WIDTH)
        flops = 4.0 * rows * WIDTH * HIDDEN
        builder.add(f"experts up {name}", layers, [gated(each, tile) for each in up], moved, flops, is_fp8=True)
        moved = stored / 2 + 2.0 * rows * (HIDDEN + WIDTH)
        builder.add(f"experts down {name}", layers, [plain(each, tile) for each in down], moved, flops / 2, is_fp8=True)
