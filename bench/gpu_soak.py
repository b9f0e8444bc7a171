"""Does an executor that runs ahead stay right for ten thousand steps of arrivals, cancels and preemptions?

    python -m bench.gpu_soak [--steps 10000]          # a minute, and Python's start

A tiny random Llama answers the same few prompts again and again, beside changing mates. Every answer must equal the
first one to its prompt, all blocks must be free in the end, and the device's memory must not have grown. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.engine_models import write_model
from bench.gpu_time import machine
from kernels.batch import PENDING, Batch, Row, Sampled, SamplingParams
from kernels.executor import Executor, Step
from kernels.kv.pool import BlockPool

TINY: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}
_PROMPTS = 24
_MOST_RUNNING = 40
_NUM_BLOCKS = 96
_STOPS = frozenset(range(0, 1000, 61))


@dataclass(slots=True, eq=False)
class _Sequence:
    prompt: int
    tokens: list[int]
    limit: int
    name: int = 0
    """What the executor knows it by; another one after each preemption."""
    blocks: list[int] = field(default_factory=list)
    is_gone: bool = False


class Soak:
    """A small engine loop that launches each step before the last one's tokens are known."""

    def __init__(self, executor: Executor, seed: int) -> None:
        self._executor = executor
        self._random = random.Random(seed)
        self._pool = BlockPool(executor.num_blocks, executor.layout.block_tokens)
        vocabulary = executor.config.vocab_size
        self._prompts = [
            [self._random.randrange(vocabulary) for _ in range(self._random.choice((1, 9, 64, 127, 128, 300)))]
            for _ in range(_PROMPTS)
        ]
        self._params = [
            SamplingParams(temperature=0.0)
            if index % 3 == 0
            else SamplingParams(
                temperature=0.9, seed=index, top_k=20 if index % 3 == 1 else 0, presence_penalty=index % 2
            )
            for index in range(_PROMPTS)
        ]
        self._running: list[_Sequence] = []
        self._names = 0
        self.answers: dict[int, list[int]] = {}
        self.finished = self.cancelled = self.preempted = self.wrong = 0

    def run(self, steps: int) -> None:
        last: tuple[Step, list[_Sequence]] | None = None
        for _ in range(steps):
            self._arrive()
            self._disturb()
            drawing = {row.sequence for row in last[0].batch.rows} if last else set()
            rows, sequences = self._rows(drawing)
            launched = (self._executor.launch(Batch(tuple(rows))), sequences) if rows else None
            if last is not None:
                self._take_in(last[1], self._executor.collect(last[0]))
            last = launched
        if last is not None:
            self._executor.collect(last[0])
        for sequence in list(self._running):
            self._drop(sequence)

    @property
    def used_blocks(self) -> int:
        return self._pool.used_blocks

    def _arrive(self) -> None:
        while len(self._running) < _MOST_RUNNING and self._random.random() < 0.5:
            prompt = self._random.randrange(_PROMPTS)
            tokens = list(self._prompts[prompt])
            self._running.append(_Sequence(prompt, tokens, len(tokens) + 20 + prompt, self._name()))

    def _disturb(self) -> None:
        if self._running and self._random.random() < 0.05:
            self._drop(self._random.choice(self._running))
            self.cancelled += 1
        if self._running and self._random.random() < 0.05:
            self._preempt(self._random.choice(self._running))

    def _rows(self, drawing: set[int]) -> tuple[list[Row], list[_Sequence]]:
        """drawing: names whose newest token is still being drawn."""
        rows, sequences = [], []
        for sequence in list(self._running):
            ahead = int(sequence.name in drawing)
            length = len(sequence.tokens) + ahead
            if length >= sequence.limit or not self._has_room(sequence, length):
                continue
            is_new = not sequence.blocks
            missing = -(-length // self._pool.block_tokens) - len(sequence.blocks)
            sequence.blocks += self._pool.allocate(max(missing, 0))
            token_ids: Sequence[int] = sequence.tokens if is_new else (PENDING,) if ahead else sequence.tokens[-1:]
            start = 0 if is_new else length - 1
            rows.append(
                Row(
                    sequence.name,
                    list(token_ids),
                    start,
                    sequence.blocks,
                    self._params[sequence.prompt],
                    list(sequence.tokens),
                    len(self._prompts[sequence.prompt]),
                )
            )
            sequences.append(sequence)
        return rows, sequences

    def _has_room(self, sequence: _Sequence, length: int) -> bool:
        missing = -(-length // self._pool.block_tokens) - len(sequence.blocks)
        if missing <= self._pool.free_blocks:
            return True
        if sequence.blocks:
            self._preempt(sequence)
        return False

    def _take_in(self, sequences: Sequence[_Sequence], sampled: Sequence[Sampled]) -> None:
        for sequence, each in zip(sequences, sampled, strict=True):
            if sequence.is_gone or each.sequence != sequence.name:
                continue  # the extra step of a sequence that ended, or one from before it was preempted
            sequence.tokens.append(each.token_id)
            if each.token_id in _STOPS or len(sequence.tokens) == sequence.limit:
                self._finish(sequence)

    def _finish(self, sequence: _Sequence) -> None:
        answer = sequence.tokens[len(self._prompts[sequence.prompt]) :]
        if self.answers.setdefault(sequence.prompt, answer) != answer:
            self.wrong += 1
        self.finished += 1
        self._drop(sequence)

    def _drop(self, sequence: _Sequence) -> None:
        sequence.is_gone = True
        self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []

    def _preempt(self, sequence: _Sequence) -> None:
        self.preempted += 1
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.name = [], self._name()

    def _name(self) -> int:
        self._names += 1
        return self._names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"figure": "soak", "skipped": "there is no GPU here"}))
        return 2
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as scratch:
        folder = write_model(TINY, Path(scratch), seed=1, dtype=torch.bfloat16)
        executor = Executor.load(folder, dtype="bf16", num_blocks=_NUM_BLOCKS, device="cuda")
        executor.warm_up()
        soak = Soak(executor, seed=5)
        soak.run(300)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        soak.run(asked.steps)
        torch.cuda.synchronize()
        line = {
            "figure": "soak",
            "machine": machine(),
            "steps": asked.steps,
            "seconds": round(time.perf_counter() - start, 1),
            "finished": soak.finished,
            "cancelled": soak.cancelled,
            "preempted": soak.preempted,
            "answers_that_differ": soak.wrong,
            "blocks_held_at_the_end": soak.used_blocks,
            "device_bytes_grown": torch.cuda.memory_allocated() - before,
            "passed": not (soak.wrong or soak.used_blocks),
        }
    print(json.dumps(line), flush=True)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "gpu_soak.json").write_text(json.dumps(line, indent=1) + "\n")
    return int(bool(soak.wrong or soak.used_blocks))


if __name__ == "__main__":
    sys.exit(main())
