"""Do the same tokens come out of a GPU whichever way they are computed, and are they the CPU's?

    python -m bench.gpu_same_tokens                      # the tiny V4.1 checkpoint of the tests
    python -m bench.gpu_same_tokens --model DIR          # a Llama-family folder with its tokenizer.json
    python -m bench.gpu_same_tokens --services 1 2       # through services: a prefill and a decode replica, then two

A folder without weights, such as a tokenizer and its config alone, gets random ones of SmolLM2's shape.

Greedy and seeded answers: prompts alone and whole against chunks, with mates, preempted, kernel by kernel instead of
in graphs, and launched before the last step's tokens are known. Then, teacher-forced, the greedy choice against the
CPU's in fp32, where the CPU's best two are no near tie. Half a minute for V4.1, two for a small dense model. Through
services, instead of these: every prompt greedy and seeded beside one process, cold and then over what the first time
left in pools; a minute for each number of replicas. One JSON line each; exit status 1 where any token differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.engine_models import write_random_model
from bench.gpu_time import machine
from kernels.batch import PENDING, Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.generate import GenerateRequest, Generator

ROOT = Path(__file__).resolve().parent.parent
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "seeded": SamplingParams(temperature=0.8, seed=1234)}
MAX_TOKENS = 12
WHOLE = 8192
TIE = {"dense": 0.5, "v41": 2.0}
"""Logits between the CPU's best two that a GPU need not tell apart: bf16 against fp32; fp8 and fp4 against exact."""
_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 81, 127, 128, 129, 257, 300)

Answers = dict[str, list[tuple[int, ...]]]


def with_weights(folder: Path, scratch: Path) -> Path:
    """The folder itself, or in another all that it holds beside random weights of SmolLM2's shape."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")):
        return folder
    made = scratch / f"{folder.name}-random"
    made.mkdir()
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, made)
    return write_random_model("smollm2-135m", made)


def prompts_of(model_dir: Path, *, has_windows: bool) -> list[tuple[int, ...]]:
    """Texts, or where there are windows ids around all the lengths at which something changes."""
    if not has_windows:
        from e2e.prompts import prompts

        return [each.token_ids for each in prompts(model_dir)]
    return [
        tuple((index * 37 + length * 11 + index * index % 7) % 256 + 3 for index in range(length))
        for length in _LENGTHS
    ]


def generated(executor: Executor, wanted: Sequence[Sequence[int]], *, chunk: int, at_once: int) -> tuple[Answers, int]:
    """Answers by sampling, and how often a sequence gave way."""
    generator, found = Generator(executor, chunk_tokens=chunk, max_batch=at_once), {}
    for name, sampling in SAMPLINGS.items():
        requests = [GenerateRequest(ids, sampling, MAX_TOKENS) for ids in wanted]
        found[name] = [result.token_ids for result in generator.generate(requests)]
    return found, generator.num_preemptions


def ahead(executor: Executor, wanted: Sequence[Sequence[int]]) -> Answers:
    """Every step but the first is launched before the tokens of the one before it are collected."""
    return {name: _ahead(executor, wanted, sampling) for name, sampling in SAMPLINGS.items()}


def _ahead(executor: Executor, wanted: Sequence[Sequence[int]], sampling: SamplingParams) -> list[tuple[int, ...]]:
    size, reach = executor.layout.block_tokens, executor.preceding_tokens
    found: list[tuple[int, ...]] = []
    for first in range(0, len(wanted), executor.num_windows - 1 if executor.window else 8):
        group = wanted[first : first + (executor.num_windows - 1 if executor.window else 8)]
        known, tables, block = [list(ids) for ids in group], [], 1
        for ids in group:
            count = -(-(len(ids) + MAX_TOKENS) // size)
            tables.append(range(block, block + count))
            block += count
        for at in range(len(group) if executor.window else 0):
            executor.reset_window(at + 1)
        named: list[dict[str, Any]] = [
            {
                "sequence": first + at,
                "block_table": table,
                "sampling": sampling,
                "num_prompt_tokens": len(ids),
                "window": at + 1 if executor.window else 0,
            }
            for at, (ids, table) in enumerate(zip(group, tables, strict=True))
        ]
        running = executor.launch(
            Batch(
                tuple(
                    Row(token_ids=ids, position=0, history=ids, **each) for ids, each in zip(group, named, strict=True)
                )
            )
        )
        for step in range(MAX_TOKENS - 1):
            rows = []
            for ids, so_far, each in zip(group, known, named, strict=True):
                at = len(ids) + step
                before = so_far[max(at - reach, 0) : at]
                rows.append(Row(token_ids=(PENDING,), position=at, history=so_far, preceding=before, **each))
            launched = executor.launch(Batch(tuple(rows)))
            _take(executor, running, known)
            running = launched
        _take(executor, running, known)
        found += [tuple(so_far[len(ids) :]) for ids, so_far in zip(group, known, strict=True)]
    return found


def _take(executor: Executor, step: Any, known: Sequence[list[int]]) -> None:
    for so_far, sampled in zip(known, executor.collect(step), strict=True):
        so_far.append(sampled.token_id)


@contextmanager
def without_graphs(executor: Executor, *, is_walked: bool) -> Iterator[None]:
    """Kernels of small steps are launched one by one.  is_walked: by the code for long steps, if it is another."""
    owned = vars(executor._model)  # noqa: SLF001 - what a captured step hides is the thing in question
    steps = {name: each for name, each in owned.items() if name in {"_decode", "_graphs"}}
    kept = {name: dict(vars(each)["_graphs"]) for name, each in steps.items()}
    for each in steps.values():
        vars(each)["_graphs"].clear()
        if is_walked and hasattr(each, "takes"):
            each.takes = lambda _: False
    try:
        yield
    finally:
        for name, each in steps.items():
            vars(each)["_graphs"].update(kept[name])
            vars(each).pop("takes", None)


def cpu_agreement(
    model_dir: Path, wanted: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], tie: float
) -> dict[str, Any]:
    """At each step of the GPU's own greedy answers: does the CPU's fp32 choose the same token?"""
    executor = Executor.load(model_dir, dtype="fp32", num_blocks=64, threads=8, device="cpu")
    size, agreed, ties, others = executor.layout.block_tokens, 0, 0, []
    for number, (ids, answer) in enumerate(zip(wanted, answers, strict=True)):
        if executor.window:
            executor.reset_window(1)
        tokens = [*ids, *answer]
        table = range(1, 1 - (-len(tokens) // size))
        row = Row(
            0,
            tokens[:-1],
            0,
            table,
            SAMPLINGS["greedy"],
            window=1 if executor.window else 0,
            targets=tokens[1:],
            num_target_logprobs=2,
        )
        scores = executor.score(executor.launch(Batch((row,))))[0]
        for at, each in enumerate(scores[-len(answer) :]):
            (best, top), (_, second) = each.top[:2]
            if top - second <= tie:
                ties += 1
            elif best == answer[at]:
                agreed += 1
            else:
                others.append(
                    {"prompt": number, "step": at, "gpu": answer[at], "cpu": best, "margin": round(top - second, 3)}
                )
    return {"agreed": agreed, "near_ties": ties, "differ": others[:5], "same": not others}


def compare_ways(model_dir: Path, device: str, say: Callable[..., None]) -> None:
    """In one process."""
    executor = Executor.load(model_dir, dtype="bf16", num_blocks=400, num_windows=16, device=device, run_ahead=True)
    executor.warm_up()
    wanted = prompts_of(model_dir, has_windows=executor.window is not None)
    expected, _ = generated(executor, wanted, chunk=WHOLE, at_once=1)

    def compare(way: str, found: Mapping[str, Sequence[Sequence[int]]], **more: Any) -> None:
        differ = sum(a != b for name in expected for a, b in zip(expected[name], found[name], strict=True))
        say(way=way, answers=2 * len(wanted), differ=differ, same=not differ, **more)

    size = executor.layout.block_tokens
    compare("again", generated(executor, wanted, chunk=WHOLE, at_once=1)[0])
    for chunk in (size, 2 * size, 7):
        compare(f"chunks of {chunk}", generated(executor, wanted, chunk=chunk, at_once=1)[0])
    compare("with 7 mates", generated(executor, wanted, chunk=WHOLE, at_once=8)[0])
    compare("chunks of a block, with 7 mates", generated(executor, wanted, chunk=size, at_once=8)[0])
    compare("ahead of the tokens", ahead(executor, wanted))
    with without_graphs(executor, is_walked=False):
        compare("without graphs", generated(executor, wanted, chunk=WHOLE, at_once=1)[0])
        compare("without graphs, ahead, with mates", ahead(executor, wanted))
    with without_graphs(executor, is_walked=True):
        compare("without graphs, as long steps are", generated(executor, wanted, chunk=WHOLE, at_once=8)[0])
    longest = max(-(-(len(ids) + MAX_TOKENS) // size) for ids in wanted)
    kind = "v41" if executor.window else "dense"
    del executor
    torch.cuda.empty_cache()
    tight = Executor.load(model_dir, dtype="bf16", num_blocks=longest + 3, num_windows=16, device=device)
    found, preemptions = generated(tight, wanted, chunk=WHOLE, at_once=8)
    compare("preempted", found, preemptions=preemptions)
    del tight
    say(way="the CPU's fp32", tie=TIE[kind], **cpu_agreement(model_dir, wanted, expected["greedy"], TIE[kind]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--services", type=int, nargs="+", help="numbers of replicas of prefill and of decode each")
    parser.add_argument("--out", type=Path, help="folder for gpu_same_tokens_<model>.json, written after each line")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"bench": "gpu_same_tokens", "skipped": "there is no GPU here"}))
        return 2
    scratch = tempfile.TemporaryDirectory(prefix="fathom-bench-")
    model_dir = ROOT / "kernels" / "tests" / "golden" / "tiny-v41"
    if asked.model:
        model_dir = with_weights(asked.model.resolve(), Path(scratch.name))
    lines: list[dict[str, Any]] = []

    def say(**named: Any) -> None:
        lines.append({"bench": "gpu_same_tokens", "model": model_dir.name} | named)
        print(json.dumps(lines[-1]), flush=True)
        if asked.out:
            kind = "services" if asked.services else "tokens"
            asked.out.mkdir(parents=True, exist_ok=True)
            path = asked.out / f"gpu_same_{kind}_{model_dir.name.lower()}.json"
            path.write_text(json.dumps(lines, indent=1) + "\n")

    say(machine=machine() if asked.device == "cuda" else asked.device)
    if asked.services:
        from bench.gpu_same_services import through_services  # the services' own packages, which other runs do not need

        through_services(model_dir, asked.services, dtype="bf16" if asked.device == "cuda" else "fp32", say=say)
    else:
        compare_ways(model_dir, asked.device, say)
    scratch.cleanup()
    return int(not all(line.get("same", True) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
