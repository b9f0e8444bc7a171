"""How fast is DeepSeek-V4.1 on this CPU, what does a decode step move, and what does bounded replay save?

    python -m bench.v41                  # the tiny checkpoint of the tests
    python -m bench.v41 --model DIR

One JSON line per figure. Bytes moved are counted where the caches are read and written, and printed beside what the
architecture's record sizes say; replay is timed beside `off` in the same run, taking turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.machine import describe
from kernels.batch import NO_REPLAY, Batch, Replay, Row, SamplingParams
from kernels.executor import Executor
from kernels.kv.replay import Mode, plan_hit
from kernels.models.v41 import cache
from kernels.models.v41.config import V41Config, read_v41_config

TINY = Path(__file__).resolve().parent.parent / "kernels" / "tests" / "golden" / "tiny-v41"
PROMPT_TOKENS = 500
HIT_TOKENS = 464
"""Whole blocks of the prompt, as many as a later prompt of its length can reuse."""
DECODE_STEPS = 24
REPEATS = 5
GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """One executor, its prompt, and a table of blocks per sequence."""

    def __init__(self, model_dir: Path, threads: int) -> None:
        self.config: V41Config = read_v41_config(model_dir)
        self.blocks = -(-(PROMPT_TOKENS + DECODE_STEPS + 1) // self.config.block_tokens)
        self.executor = Executor.load(
            model_dir, dtype="fp32", num_blocks=1 + 8 * self.blocks, num_windows=8, threads=threads
        )
        ids = range(PROMPT_TOKENS + DECODE_STEPS)
        self.ids = [(index * 7919 + 17) % (self.config.vocab_size - 64) + 3 for index in ids]

    def row(self, sequence: int, start: int, ids: Sequence[int], replay: Replay = NO_REPLAY) -> Row:
        table = range(1 + sequence * self.blocks, 1 + (sequence + 1) * self.blocks)
        preceding = self.ids[max(start - self.executor.preceding_tokens, 0) : start]
        return Row(
            sequence, ids, start, table, sampling=GREEDY, window=sequence + 1, preceding=preceding, replay=replay
        )

    def prefill(self, sequence: int = 0, start: int = 0, replay: Replay = NO_REPLAY) -> None:
        """Compute the prompt from `start` on; windows are empty before it."""
        self.executor.reset_window(sequence + 1)
        self.run(self.row(sequence, start, self.ids[start:PROMPT_TOKENS], replay))

    def decode(self, num_sequences: int, at: int) -> None:
        self.run(*(self.row(sequence, at, self.ids[at : at + 1]) for sequence in range(num_sequences)))

    def run(self, *rows: Row) -> None:
        self.executor.collect(self.executor.launch(Batch(rows)))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that cache records move."""
    moved = {"read": 0, "written": 0}
    kept = {name: getattr(cache.Records, name) for name in ("read", "read_slots", "write")}

    def counting(name: str) -> Callable[..., Tensor | None]:
        def call(*arguments: Any) -> Tensor | None:
            result: Tensor | None = kept[name](*arguments)
            records = arguments[-1] if result is None else result
            moved["written" if result is None else "read"] += records.numel()
            return result

        return call

    for name in kept:
        setattr(cache.Records, name, counting(name))
    try:
        yield moved
    finally:
        for name, method in kept.items():
            setattr(cache.Records, name, method)


def record_bytes(config: V41Config) -> tuple[int, int, int]:
    """Window, entry and index record: data and scales of the published formats."""
    dim, index = config.head_dim, config.index_dim
    return dim + dim // 32, dim // 2 + dim // 16, index // 2 + index // 32


def expected_bytes(config: V41Config, position: int) -> tuple[int, int]:
    """What one decode token at `position` reads and writes by the architecture's record sizes.

    Read: per layer the window before the token, per layer with entries the chosen ones, per KV source all index keys
    where there are more than may be chosen (in whole blocks).  Written: a window record per layer and drafter layer,
    the entries that the token completes, and the unfinished pair's score and latent.
    """
    window, entry, index = record_bytes(config)
    read = config.num_layers * min(position, config.window_tokens - 1) * window
    for ratio in config.compress_ratios[: config.num_layers]:
        if ratio:
            read += (
                config.index_topk * entry if (position + 1) // ratio > config.index_topk else position // ratio * entry
            )
    written = (config.num_layers + config.drafter.num_layers) * window
    for source in config.kv_sources:
        ratio = config.compress_ratios[source]
        if (position + 1) // ratio > config.index_topk:
            blocks = position // config.block_tokens + 1
            read += blocks * (config.block_tokens // ratio) * index
        if (position + 1) % ratio == 0:
            written += entry + index
        if ratio > 1:  # the ring of the pair that is not finished: score and latent in fp32
            written += 2 * config.head_dim * 4
            read += 2 * config.head_dim * 4 if (position + 1) % ratio == 0 else 0
    return read, written


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def say(figure: str, **fields: Any) -> None:
    print(json.dumps({"bench": "v41", "figure": figure, **fields}), flush=True)


def _next(bench: Bench, batch: int, places: Iterator[int]) -> None:
    bench.decode(batch, next(places))


def speed(bench: Bench) -> None:
    bench.prefill()
    say("prefill", unit="tokens/s", tokens=PROMPT_TOKENS, value=round(PROMPT_TOKENS / seconds(bench.prefill), 1))
    for batch in (1, 8):
        for sequence in range(batch):
            bench.prefill(sequence)
        places = iter(range(PROMPT_TOKENS, PROMPT_TOKENS + DECODE_STEPS))
        step = seconds(partial(_next, bench, batch, places), DECODE_STEPS)
        say("decode", unit="tokens/s", batch=batch, context=PROMPT_TOKENS, value=round(batch / step, 1))


def traffic(bench: Bench) -> None:
    for position in (PROMPT_TOKENS, PROMPT_TOKENS + 1):
        bench.prefill()
        for at in range(PROMPT_TOKENS, position):
            bench.decode(1, at)
        with counted() as moved:
            bench.decode(1, position)
        read, written = expected_bytes(bench.config, position)
        say(
            "bytes_per_decode_step", unit="bytes", position=position, read=moved["read"], read_by_formats=read,
            written=moved["written"], written_by_formats=written,
        )  # fmt: skip


def replay(bench: Bench) -> None:
    """Time to the first token, cold and after a hit without a window state, by mode."""
    bench.prefill()
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    modes: tuple[Mode, ...] = ("off", "mask", "compact")
    for _ in range(REPEATS):
        for mode in modes:
            for times, matched in ((cold, 0), (warm, HIT_TOKENS)):
                hit = plan_hit(
                    PROMPT_TOKENS, matched, block_tokens=bench.config.block_tokens, window=bench.executor.window,
                    states=(), mode=mode,
                )  # fmt: skip
                started = time.perf_counter()
                bench.prefill(0, hit.compute_from, hit.replay)
                times.setdefault(mode, []).append(time.perf_counter() - started)
    for name, times in (("cold", cold), ("hit_without_windows", warm)):
        off = statistics.median(times["off"])
        for mode in modes:
            took = statistics.median(times[mode])
            say(
                f"replay_{name}", mode=mode, unit="seconds", value=round(took, 4), speedup_over_off=round(off / took, 2)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=TINY, help="a DeepSeek-V4.1 folder (default: the tests' tiny one)"
    )
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    say("machine", machine=describe(), torch=torch.__version__)
    bench = Bench(asked.model, asked.threads)
    say("recipe", recipe=bench.executor.recipe)
    speed(bench)
    traffic(bench)
    replay(bench)


if __name__ == "__main__":
    main()
