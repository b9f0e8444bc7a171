"""How fast are dense models on one GPU, beside what its memory and arithmetic allow?

    python -m bench.gpu_dense                       # every row
    python -m bench.gpu_dense --model llama-8b --out bench/results

Two and a half minutes for both models. Random weights of the real shapes; one JSON line per figure, with the yardsticks
of the same run; a case that fails does not hide the others, and files are written after each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu_models import RandomModel
from bench.gpu_shapes import GPU_SHAPES
from bench.gpu_time import machine, timed_event, yardsticks
from bench.roofline import Work, decode_work, prefill_work
from kernels.batch import PENDING, Batch, Row, SamplingParams
from kernels.executor import Executor, Step

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
_STEPS = 48
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: sequences x context; prefill takes chunks of whole prompts."""

    kind: str
    batch: int
    context: int
    sampling: SamplingParams = GREEDY


CASES = {
    "llama-8b": (
        Case("decode", 1, 1024),
        Case("decode", 64, 1024),
        Case("decode", 256, 1024),
        Case("decode", 8, 8192),
        Case("prefill", 64, 1024),
        Case("decode", 64, 1024, SAMPLED),
    ),
    "smollm2-135m": (
        Case("decode", 1, 512),
        Case("decode", 64, 512),
        Case("decode", 256, 512),
        Case("prefill", 64, 1024),
        Case("decode", 64, 512, SAMPLED),
    ),
}
_CHUNK_TOKENS = 16384


class Loop:
    """An executor driven as an engine drives it, minus scheduling."""

    def __init__(self, executor: Executor, case: Case) -> None:
        self._executor, self._case = executor, case
        size = executor.layout.block_tokens
        self._per_table = -(-(case.context + _STEPS) // size)
        self._tables = [
            list(range(1 + index * self._per_table, 1 + (index + 1) * self._per_table)) for index in range(case.batch)
        ]
        self._vocab = executor.config.vocab_size

    def blocks(self) -> int:
        return 1 + self._case.batch * self._per_table

    def _rows(self, step: int, token: int) -> Batch:
        """Contexts are the case's on average over the steps."""
        position = self._case.context - _STEPS // 2 + step
        return Batch(
            tuple(
                Row(index, (token,), position, table, self._case.sampling) for index, table in enumerate(self._tables)
            )
        )

    def ahead(self) -> float:
        """Seconds of a step when the next one is launched before the last one's tokens are collected."""
        running = self._executor.launch(self._rows(0, 5))
        self._executor.collect(running)
        running = self._executor.launch(self._rows(0, 5))
        start = time.perf_counter()
        for step in range(1, _STEPS):
            launched = self._executor.launch(self._rows(step, PENDING))
            self._executor.collect(running)
            running = launched
        self._executor.collect(running)
        return (time.perf_counter() - start) / _STEPS

    def waiting(self) -> float:
        """Seconds of a step in the plain loop: launch, collect, launch."""
        token = 5
        self._executor.collect(self._executor.launch(self._rows(0, token)))
        start = time.perf_counter()
        for step in range(_STEPS):
            token = self._executor.collect(self._executor.launch(self._rows(step, token)))[0].token_id
        return (time.perf_counter() - start) / _STEPS

    def host(self) -> float:
        """Seconds the host needs to plan and launch a step and to take in its tokens, the device's time aside."""
        taken = []
        for step in range(8):
            torch.cuda.synchronize()
            start = time.perf_counter()
            launched = self._executor.launch(self._rows(step, 5))
            middle = time.perf_counter()
            torch.cuda.synchronize()
            again = time.perf_counter()
            self._executor.collect(launched)
            taken.append(middle - start + time.perf_counter() - again)
        return statistics.median(taken)

    def device(self) -> float:
        """Seconds of the device alone: the same step enqueued many times behind a long wait."""
        step = self._rows(_STEPS // 2 + 1, 5)  # no block begins at this position
        self._executor.collect(self._executor.launch(step))
        count = 3  # fewer than buffers between host and device, so that the host never waits
        start, end = timed_event(), timed_event()
        torch.cuda._sleep(int(2e9 * self._case.batch * count * 2e-5) + 20_000_000)  # type: ignore[no-untyped-call] # noqa: SLF001 - no public name
        start.record()
        launched = [self._executor.launch(step) for _ in range(count)]
        end.record()
        torch.cuda.synchronize()
        assert launched
        return float(start.elapsed_time(end)) / 1e3 / count

    def prefill(self) -> float:
        """Seconds for all prompts, in steps of whole prompts."""
        ids = [(index * 7919 + 17) % self._vocab for index in range(self._case.context)]
        per_step = max(1, _CHUNK_TOKENS // self._case.context)
        running: list[Step] = []
        torch.cuda.synchronize()
        start = time.perf_counter()
        for first in range(0, self._case.batch, per_step):
            rows = tuple(
                Row(index, ids, 0, self._tables[index], GREEDY)
                for index in range(first, min(first + per_step, self._case.batch))
            )
            running.append(self._executor.launch(Batch(rows)))
            if len(running) > 1:
                self._executor.collect(running.pop(0))
        self._executor.collect(running.pop())
        return time.perf_counter() - start


def _median(call: Callable[[], float]) -> float:
    call()
    return statistics.median(call() for _ in range(_REPEATS))


def measure(
    model: RandomModel, executors: dict[str, Executor], case: Case, ceilings: dict[str, float]
) -> dict[str, object]:
    """One row, for the fastest mode and the invariant one."""
    figures: dict[str, object] = {}
    work = (decode_work if case.kind == "decode" else prefill_work)(model.config, case.batch, case.context)
    tokens = case.batch if case.kind == "decode" else case.batch * case.context
    for mode, executor in executors.items():
        loop = Loop(executor, case)
        if case.kind == "prefill":
            seconds = _median(loop.prefill)
            figures[mode] = {"tokens_per_second": round(tokens / seconds, 1), "seconds": seconds}
            continue
        ahead, waiting, device, host = _median(loop.ahead), _median(loop.waiting), _median(loop.device), loop.host()
        figures[mode] = {
            "tokens_per_second": round(tokens / ahead, 1),
            "step_seconds": ahead,
            "waiting_step_seconds": waiting,
            "device_step_seconds": device,
            "host_seconds": host,
            "idle_share": round(max(0.0, 1 - device / ahead), 4),
        }
    return figures | {
        "floor_seconds": work.floor_seconds(ceilings),
        "floor_tokens_per_second": _floor(work, tokens, ceilings),
    }


def _floor(work: Work, tokens: int, ceilings: dict[str, float]) -> float:
    return round(tokens / work.floor_seconds(ceilings), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(GPU_SHAPES), action="append")
    parser.add_argument("--out", type=Path, help="folder for one JSON file per model")
    parser.add_argument("--modes", default="fastest,invariant")
    asked = parser.parse_args()
    ceilings, is_whole = yardsticks(), True
    print(json.dumps({"machine": machine(), **ceilings}), flush=True)
    for name in asked.model or sorted(GPU_SHAPES):
        lines: list[dict[str, object]] = []
        with tempfile.TemporaryDirectory(prefix="fathom-bench-") as scratch:
            model = RandomModel(name, Path(scratch))
            blocks = 2 + max(case.batch * (1 + (case.context + _STEPS - 1) // 128) for case in CASES[name])
            executors = {mode: model.executor(blocks, invariant=mode == "invariant") for mode in asked.modes.split(",")}
            for case in CASES[name]:
                facts = {
                    "figure": f"{name} {case.kind}",
                    "batch": case.batch,
                    "context": case.context,
                    "sampling": "greedy" if case.sampling is GREEDY else "temperature 0.8, top-p 0.95",
                }
                try:
                    lines.append(facts | measure(model, executors, case, ceilings))
                except Exception as error:  # noqa: BLE001 - said, and the next is measured
                    is_whole = False
                    print(json.dumps(facts | {"failed": f"{type(error).__name__}: {str(error)[-300:]}"}), flush=True)
                    traceback.print_exc(limit=6, file=sys.stderr)
                    continue
                print(json.dumps(lines[-1]), flush=True)
                if asked.out:
                    write(asked.out, name, ceilings, lines)
            del executors, model
            torch.cuda.empty_cache()
    return int(not is_whole)


def write(out: Path, model: str, ceilings: dict[str, float], lines: list[dict[str, object]]) -> None:
    """A model's figures so far."""
    out.mkdir(parents=True, exist_ok=True)
    command = f"python -m bench.gpu_dense --model {model}"
    document = {"machine": machine(), "command": command, "yardsticks": ceilings, "figures": lines}
    (out / f"gpu_dense_{model}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
