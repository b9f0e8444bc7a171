"""How long does work on a GPU take, and how fast is this GPU at all?"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence

import torch


def graph_seconds(calls: Sequence[Callable[[], object]], *, repeats: int = 7) -> float:
    """Median seconds of one call: all of them captured in one graph, which is replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return event_seconds(graph.replay, repeats=repeats) / len(calls)


def event_seconds(call: Callable[[], object], *, repeats: int = 7) -> float:
    """Median seconds between events around a call, after one to warm up."""
    call()
    taken: list[float] = []
    for _ in range(repeats):
        start, end = timed_event(), timed_event()
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(taken)


def timed_event() -> torch.cuda.Event:
    """An event that knows when it was passed."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's stub


def yardsticks() -> dict[str, float]:
    """Measured ceilings: rates of copies, reads and pinned host memory (bytes/s), bf16 GEMM (FLOP/s), a kernel (s)."""
    _need_gpu()
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = event_seconds(lambda: target.copy_(source))
    read = event_seconds(lambda: torch.sum(source.view(torch.int32)))
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    landing = torch.empty_like(pinned, device="cuda")
    fetch = event_seconds(lambda: landing.copy_(pinned, non_blocking=True))
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm = event_seconds(lambda: a @ b)
    small = torch.zeros(16, device="cuda")
    launch = graph_seconds([lambda: small.add_(1.0)] * 200)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / copy,
        "read_bytes_per_second": source.nbytes / read,
        "host_bytes_per_second": pinned.nbytes / fetch,
        "gemm_flops": 2 * size**3 / gemm,
        "graph_kernel_seconds": launch,
    }


def _need_gpu() -> None:
    """Ends a bench with 2 where there is none, in a line like its figures."""
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "this needs a GPU, and a torch with CUDA: none is here"}), flush=True)
        raise SystemExit(2)


def machine() -> str:
    """Which GPU and software."""
    import triton

    _need_gpu()
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
