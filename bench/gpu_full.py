"""Does a GPU whose memory is planned to the last block hold out while every block is filled?

    python -m bench.gpu_full --out DIR          # about a minute; --seconds: of filling, at most

SmolLM2's shape with random weights, loaded as a service loads it: all memory that is free becomes KV blocks. The same
prompt is computed by as many sequences as there are tables, in the largest steps that are planned for, then continued
in captured steps. All answers, and the blocks that are read back, must be the first one's; nothing may run out of
memory. One JSON line.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.engine_models import SHAPES, write_model
from bench.gpu_lines import Lines
from bench.gpu_time import machine
from kernels.batch import Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.memory_plan import STEP_TOKENS

GREEDY = SamplingParams(temperature=0.0)
_BLOCKS_EACH, _SHORT_OF = 8, 8
"""Of a sequence; tokens that its last block has room for behind the prompt."""
_CONTINUED = 4
_AT_ONCE = 256
_READ_BACK = 64
_ABSENT = 2

Tables = list[range]


def tables_of(executor: Executor) -> Tables:
    """Every block but the null block, in tables of eight; the last one ends with the last block."""
    last = executor.num_blocks - 1
    first = 1 + last % _BLOCKS_EACH
    return [range(at, at + _BLOCKS_EACH) for at in range(first, last + 1, _BLOCKS_EACH)]


def in_groups(tables: Tables, size: int) -> Iterator[tuple[int, Tables]]:
    return ((first, tables[first : first + size]) for first in range(0, len(tables), size))


def fill(executor: Executor, tables: Tables, prompt: Sequence[int], end: float) -> list[int]:
    """First tokens, of as many sequences as were computed before the clock says `end`."""
    tokens: list[int] = []
    for first, group in in_groups(tables, max(STEP_TOKENS // len(prompt), 1)):
        rows = (Row(first + at, prompt, 0, table, GREEDY) for at, table in enumerate(group))
        tokens += [each.token_id for each in executor.collect(executor.launch(Batch(tuple(rows))))]
        if time.monotonic() > end:
            break
    return tokens


def go_on(executor: Executor, tables: Tables, prompt: Sequence[int], tokens: list[int]) -> list[tuple[int, ...]]:
    """What follows each first token, greedily."""
    answers: list[tuple[int, ...]] = [(token,) for token in tokens]
    for step in range(_CONTINUED):
        for first, group in in_groups(tables[: len(answers)], _AT_ONCE):
            rows = (
                Row(first + at, answers[first + at][-1:], len(prompt) + step, table, GREEDY)
                for at, table in enumerate(group)
            )
            sampled = executor.collect(executor.launch(Batch(tuple(rows))))
            for at, each in enumerate(sampled):
                answers[first + at] += (each.token_id,)
    return answers


def differing_blocks(executor: Executor, tables: Tables) -> int:
    """Of the blocks of some tables, the last one's among them: those that are not the first table's in every byte."""
    picked = random.Random(1).sample(range(len(tables)), min(_READ_BACK, len(tables)))
    first = [executor.read_block(block) for block in tables[0]]
    some = [tables[at] for at in sorted({*picked, len(tables) - 1})]
    return sum(executor.read_block(block) != mine for table in some for block, mine in zip(table, first, strict=True))


def measure(executor: Executor, seconds: float) -> dict[str, Any]:
    """What becomes of a full device."""
    size, vocabulary = executor.layout.block_tokens, executor.config.vocab_size
    prompt = [(at * 7919 + 17) % vocabulary for at in range(_BLOCKS_EACH * size - _SHORT_OF)]
    tables, start = tables_of(executor), time.monotonic()
    tokens = fill(executor, tables, prompt, start + seconds)
    filled = time.monotonic() - start
    answers = go_on(executor, tables, prompt, tokens)
    differ = sum(each != answers[0] for each in answers)
    blocks = differing_blocks(executor, tables[: len(tokens)])
    return {
        "blocks": executor.num_blocks,
        "block_bytes": executor.layout.block_bytes,
        "filled_share": round(len(tokens) * _BLOCKS_EACH / (executor.num_blocks - 1), 4),
        "sequences": len(tokens),
        "seconds": round(filled, 1),
        "tokens_per_second": round(len(tokens) * len(prompt) / filled),
        "answers_that_differ": differ,
        "blocks_that_differ": blocks,
        "passed": not differ and not blocks and len(tokens) == len(tables),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of filling, at most")
    parser.add_argument("--out", type=Path, help="folder for gpu_full.json")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        Lines().say("full device", skipped="there is no GPU here")
        return _ABSENT
    said = Lines(asked.out / "gpu_full.json" if asked.out else None, machine=machine(), command="bench.gpu_full")
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as scratch:
        folder = write_model(SHAPES["smollm2-135m"], Path(scratch), seed=1, dtype=torch.bfloat16)
        try:
            with said.stage("loaded"):
                executor = Executor.load(folder, dtype="bf16", device="cuda")
                executor.warm_up()
            free, total = torch.cuda.mem_get_info()
            made = measure(executor, asked.seconds)
        except Exception as error:  # noqa: BLE001 - running out of memory is the figure
            said.say("full device", passed=False, failed=f"{type(error).__name__}: {str(error)[-400:]}")
            return 1
    left = torch.cuda.mem_get_info()[0]
    said.say("full device", **made, device_bytes=total, free_bytes_before=free, free_bytes_after=left)
    return int(said.failed)


if __name__ == "__main__":
    sys.exit(main())
