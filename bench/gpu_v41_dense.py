"""How fast are V4.1's dense fp8 products on this GPU: by the library in bf16 and fp8, and by our own kernels?

    python -m bench.gpu_v41_dense                         # the library beside `gpu_dense_fp8`, in seconds
    python -m bench.gpu_v41_experts dense                 # all ways, bf16 and `gpu_grouped_fp8` among them

JSON lines and a table as `bench.gpu_v41_experts` prints them. Results are poisoned, and compared with fp64 twice,
before they are timed.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.gpu_time import machine, yardsticks
from bench.gpu_v41_attention import Way as Setting
from bench.gpu_v41_attention import in_force, poisoned
from bench.gpu_v41_cases import HIDDEN, O_LORA, Q_LORA, WIDTH
from bench.gpu_v41_expert_work import noise
from bench.gpu_v41_ways import (
    DEEP,
    PLAIN_TOLERANCE,
    Way,
    fp8_call,
    measure,
    named,
    print_table,
    restated_rows,
    say,
)
from bench.gpu_v41_work import GROUPS
from kernels.ops import gpu_dense_fp8
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, product, restated, span_rows
from kernels.ops.gpu_grouped import Groups
from kernels.ops.gpu_grouped_fp8 import CUT, Cut
from kernels.ops.gpu_matmul import every_row
from kernels.ops.gpu_quant import round_fp8
from kernels.ops.quant import dequantise_fp8_weight, quantise_fp8_weight

CUTS = ((Cut(64, 128, 4, 4), 128), (CUT, DEEP))


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense matrix, or one for each group of heads."""

    name: str
    out: int
    size: int
    groups: int = 1


DENSES = (
    Dense("wq_a, wkv", Q_LORA + 512, HIDDEN),
    Dense("wq_b", 32_768, Q_LORA),
    Dense("wo_a", O_LORA, 4096, GROUPS),
    Dense("wo_b", HIDDEN, 8192),
    Dense("shared up", 2 * WIDTH, HIDDEN),
    Dense("shared down", HIDDEN, WIDTH),
)
DECODE_ROWS, PREFILL_ROWS = 256, 16_384
AS_THREE = tuple(
    Dense(f"{each.name} as three", 3 * each.out, gpu_dense_fp8.DEPTH.value * -(-each.size // 384))
    for each in DENSES
    if each.name in {"wo_b", "shared up", "shared down"}
)
"""Products of as many tiles and turns as these cut in three along their columns: what that takes, without adding up."""
_OURS_TOLERANCE = 2.4e-3
"""Relative L2 at most, where ours is used: the fp4 experts' kernel is as near."""
_BY_THE_LIBRARY: Setting = {(gpu_dense_fp8, "is_worth"): lambda *_: False}


def dense() -> None:
    """fp8 matrices under scales for 32 x 32 values, with a decode step's rows and a chunk's."""
    for shape, tokens in itertools.product(DENSES, (256, 16_384)):
        if tokens > 256 and shape.name not in {"wq_b", "wo_a", "wo_b", "shared up"}:
            continue
        try:
            time_dense(shape, tokens)
        except Exception as failed:  # noqa: BLE001 - the others must not be hidden
            say("failed", what=shape.name, failed=f"{type(failed).__name__}: {str(failed)[-400:]}")
            traceback.print_exc(limit=3, file=sys.stderr)


def time_dense(shape: Dense, tokens: int) -> None:
    what, count = f"{shape.name}, {tokens} rows", shape.groups
    x = round_fp8(noise(tokens * count, shape.size))
    copies = max(min(200_000_000 // (count * shape.out * shape.size), 6), 1)
    eighths: list[RowScaled] = []
    wides: list[Tensor] = []
    exact = x.new_empty(0)
    for copy in range(copies):
        wide = [_stored(shape) for _ in range(count)]
        parts = [restated(each) for each in wide]
        eighths.append(RowScaled(torch.stack([data for data, *_ in parts]), torch.stack([s for _, s, _ in parts])))
        wides.append(torch.stack(wide).bfloat16())
        if copy == 0:
            say("restated", what=what, lost=max(lost for *_, lost in parts))
            by_group = x.view(tokens, count, -1)[:256].transpose(0, 1).double()
            exact = (
                torch.bmm(by_group, torch.stack(wide).double().transpose(1, 2)).transpose(0, 1).reshape(-1, shape.out)
            )
    counted, flops = torch.arange(len(exact), device="cuda"), 2.0 * tokens * count * shape.out * shape.size
    if count == 1:
        calls: list[Callable[[], Tensor]] = [partial(torch.mm, x, each[0].t()) for each in wides]
    else:
        by_groups = x.view(tokens, count, -1).transpose(0, 1)
        calls = [partial(_by_groups, by_groups, each) for each in wides]
    measure(what, Way("library bf16", calls, exact, counted), flops)
    if count == 1:
        library_fp8(what, x, eighths, exact, counted, flops)
        own = every_row(tokens, x.device)
    else:
        order = torch.arange(tokens * count, device="cuda", dtype=torch.int32).view(tokens, count).t().reshape(-1)
        own = Groups(torch.arange(1, count + 1, device="cuda", dtype=torch.int32) * tokens, order, order)
    for cut, span in CUTS:
        spans = span_rows(x, own.sources, span=span)
        calls = [fp8_call(spans, each, own, cut, None, tokens * count) for each in eighths]
        measure(what, Way(f"fp8 {named(cut)} k{span}", calls, exact, counted), flops)
    measure(what, Way("restate", [partial(restated_rows, x)], None), 0.0, 3.0 * x.numel())


def beside() -> None:
    """A decode step's products, then a chunk's: all by the library first, whatever ours do to the device then."""
    decode = [(each, DECODE_ROWS) for each in DENSES if each.name not in {"wq_a, wkv", "wo_a"}]
    works = [*decode, *((each, DECODE_ROWS) for each in AS_THREE), *((each, PREFILL_ROWS) for each, _ in decode)]
    for is_ours, (shape, rows) in itertools.product((False, True), works):
        torch.manual_seed(1)
        try:
            time_beside(shape, rows, is_ours=is_ours)
        except Exception as failed:  # noqa: BLE001 - the others must not be hidden
            say("failed", what=shape.name, ours=is_ours, failed=f"{type(failed).__name__}: {str(failed)[-400:]}")
            traceback.print_exc(limit=3, file=sys.stderr)
        torch.cuda.empty_cache()


def time_beside(shape: Dense, tokens: int, *, is_ours: bool) -> None:
    """One product, with weights rotated past the L2 where it is short."""
    what, flops = f"{shape.name}, {tokens} rows", 2.0 * tokens * shape.out * shape.size
    num_bytes = shape.out * (shape.size + 2 * tokens) + tokens * shape.size
    x = round_fp8(noise(tokens, shape.size))
    copies = max(min(200_000_000 // (shape.out * shape.size), 8), 2) if tokens == DECODE_ROWS else 1
    wide = _stored(shape)
    parts = [restated(wide), *(restated(_stored(shape)) for _ in range(copies - 1))]
    matrices = [RowScaled(data[None], scale[None]) for data, scale, _ in parts]
    exact = x[:DECODE_ROWS].double() @ wide.double().T
    counted = torch.arange(len(exact), device="cuda")
    if not is_ours:
        library_fp8(what, x, matrices, exact, counted, flops)
        return
    rows, is_worth = span_rows(x), gpu_dense_fp8.is_worth(x, shape.out)
    name = "ours, in use" if is_worth else "ours"
    calls = [partial(_own, rows, each) for each in matrices]
    with poisoned():
        say("written", what=what, way=name, passed=bool(calls[0]().isfinite().all()))
    tolerance = _OURS_TOLERANCE if is_worth else PLAIN_TOLERANCE
    measure(what, Way(name, calls, exact, counted, tolerance), flops, num_bytes)


def _own(x: SpanRows, matrix: RowScaled) -> Tensor:
    return gpu_dense_fp8.multiply(x.data, x.scale[0], matrix.data[0], matrix.scale[0])


def _by_groups(x: Tensor, matrices: Tensor) -> Tensor:
    """[groups, tokens, in] by [groups, out, in] -> [tokens * groups, out]."""
    return torch.bmm(x, matrices.transpose(1, 2)).transpose(0, 1).reshape(-1, matrices.shape[1])


def _stored(shape: Dense) -> Tensor:
    """A matrix's values as a checkpoint has them, fp32."""
    data, scale = quantise_fp8_weight(torch.randn(shape.out, shape.size, device="cuda") * 0.02)
    return dequantise_fp8_weight(data, scale)


def library_fp8(what: str, x: Tensor, eighths: list[RowScaled], exact: Tensor, counted: Tensor, flops: float) -> None:
    """The library's scaled product, whichever is in use."""
    rows = span_rows(x)
    calls: list[Callable[[], Tensor]] = [partial(product, rows, each) for each in eighths]
    with in_force(_BY_THE_LIBRARY):
        measure(what, Way("library fp8, a scale a row", calls, exact, counted), flops)


def main() -> None:
    with torch.inference_mode():
        say("machine", machine=machine(), **{name: round(value, 9) for name, value in yardsticks().items()})
        beside()
    print_table()


if __name__ == "__main__":
    main()
