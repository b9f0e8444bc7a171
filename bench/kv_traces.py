"""How much of real traffic would the KV store have hit, by capacity and by life?

`python -m bench.kv_traces [--plot FILE]` replays published request traces against the store's own decisions, without a
disk (bench/kv_simulator.py). One JSON line a point, with its yardstick: what an endless cache would have hit.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.kv_simulator import TraceRequest, infinite_hit_rate, lru_hit_rate, read_mooncake, simulate
from bench.machine import describe

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
NAMES = {"conversation": "mooncake_conversation_trace.jsonl", "synthetic": "mooncake_synthetic_trace.jsonl"}
BLOCK_BYTES = 4 * 113_920
"""An id of these traces stands for 512 tokens: four blocks of DeepSeek-V4.1."""
CAPACITY_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25)
"""Of the bytes of all distinct blocks of the trace."""
LIVES_SECONDS = (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3 * 86_400.0)
"""The last is the agent class's life; these traces last an hour, so that shorter ones are shown too."""

Point = tuple[float, float]


def by_capacity(requests: Sequence[TraceRequest]) -> Iterator[Point]:
    """Yield (capacity in bytes, hit rate), lives as the chat class has them."""
    total = BLOCK_BYTES * len({block for request in requests for block in request.blocks})
    for share in CAPACITY_SHARES:
        max_bytes = total * share / 0.9  # the store makes room at nine tenths
        outcome = simulate(requests, max_bytes=max_bytes, block_bytes=BLOCK_BYTES, segment_bytes=_segment(max_bytes))
        yield max_bytes, outcome.hit_rate


def by_life(requests: Sequence[TraceRequest]) -> Iterator[Point]:
    """Yield (life in seconds, hit rate), with room for everything."""
    for life in LIVES_SECONDS:
        yield life, simulate(requests, block_bytes=BLOCK_BYTES, life_seconds=life).hit_rate


def _segment(max_bytes: float) -> int:
    return min(256 << 20, int(max_bytes / 64))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_traces", description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the trace files")
    parser.add_argument("--plot", type=Path, help="write the curves there, as SVG")
    words = parser.parse_args()
    found = {name: words.traces / file for name, file in NAMES.items() if (words.traces / file).exists()}
    if not found:
        raise SystemExit(f"no trace in {words.traces}: {', '.join(NAMES.values())} are looked for")
    curves: dict[str, tuple[list[Point], list[Point], float]] = {}
    for name, path in found.items():
        requests = list(read_mooncake(path))
        best = infinite_hit_rate(requests)
        sizes, lives = [], []
        for max_bytes, rate in by_capacity(requests):
            sizes.append((max_bytes, rate))
            lru = lru_hit_rate(requests, max_blocks=int(max_bytes / BLOCK_BYTES))
            fields = {"capacity_gigabytes": round(max_bytes / 1e9, 2), "single_blocks_lru": round(lru, 4)}
            _print(f"kv_hit_rate_by_capacity_{name}", rate, best, **fields)
        for life, rate in by_life(requests):
            lives.append((life, rate))
            _print(f"kv_hit_rate_by_life_{name}", rate, best, life_seconds=life)
        curves[name] = (sizes, lives, best)
    if words.plot:
        _plot(curves, words.plot)


def _print(name: str, rate: float, best: float, **fields: float) -> None:
    line = {"name": name, **fields, "hit_rate": round(rate, 4), "endless_cache": round(best, 4)}
    print(json.dumps({**line, "points_below": round((best - rate) * 100, 2), "machine": describe()}), flush=True)


def _plot(curves: dict[str, tuple[list[Point], list[Point], float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for color, (name, (sizes, lives, best)) in zip(("tab:blue", "tab:orange"), curves.items(), strict=False):
        left.plot([x / 1e9 for x, _ in sizes], [y * 100 for _, y in sizes], "o-", color=color, label=name)
        right.plot([x / 60 for x, _ in lives], [y * 100 for _, y in lives], "o-", color=color, label=name)
        for axes in (left, right):
            axes.axhline(best * 100, color=color, linestyle=":", label=f"{name}: endless cache")
    left.set_xscale("log")
    left.set_xlabel("capacity, GB (V4.1: 113,920 bytes a block of 128 tokens)")
    left.set_ylabel("blocks hit, %")
    right.set_xscale("log")
    right.set_xlabel("life of a block, minutes")
    left.set_ylim(0, math.ceil(max(best for _, _, best in curves.values()) * 10) * 10)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
