"""How long does a whole V4.1 step take on one GPU, through the executor, and how far is that from its floor?

    python -m bench.gpu_v41_step --out bench/results       # decode and prefill, invariant and fastest
    python -m bench.gpu_v41_step --modes fastest --layers 14


Decode: one rank of 64 (7 experts a layer in e4m3, rows of all ranks), 64 requests of 1 + 3 rows at 131,072 tokens.
Prefill: a chunk of 16,384 through as many encoder layers as fit with all 384 experts in fp4. The exchange between ranks
is not in either; everything else is, gaps between kernels too. Decode is also driven as an engine does it, each step
launched before it is known how many drafts of the last one were right: what that takes beyond the device's own time is
the share that the GPU idles. Then once more with the drafter's own layers, whose guesses the next step verifies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_time import machine, timed_event, yardsticks
from bench.gpu_v41_model import (
    give_past,
    one_rank_of,
    published_config,
    random_drafter,
    random_model,
    random_weights,
)
from bench.gpu_v41_work import decode_shape, prefill_shape
from bench.roofline_v41 import v41_work
from kernels.batch import PENDING, Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.models.gpu.v41.drafter import DrafterWeights
from kernels.models.gpu.v41.expert_weights import ExpertFormat
from kernels.models.gpu.v41.model import GpuV41
from kernels.models.gpu.v41.weights import GpuV41Weights
from kernels.models.v41.config import V41Config

CUDA = torch.device("cuda")
RANKS, DRAFTS, ACCEPTANCE = 64, 3, 0.75
GREEDY = SamplingParams(temperature=0.0)
BESIDE = {"decode": "15,700 on SM100", "prefill": "60,000-89,500 on SM100"}
"""Published tokens/s/GPU of whole deployments."""
_AHEAD_STEPS = 24
_IN_FLIGHT = 3
"""Fewer than buffers between host and device, so that the host never waits."""
_REPEATS = 7


def time_steps(say: Callable[..., None], ceilings: Mapping[str, float], *, modes: Sequence[str], layers: int) -> None:
    """layers: of the encoder, for prefill.  A mode that fails is said, and the others are timed."""
    took: dict[str, dict[str, float]] = {"decode": {}, "prefill": {}}
    for mode in modes:
        is_invariant = mode == "invariant"
        works: dict[str, Callable[[], dict[str, Any]]] = {
            "decode": lambda is_invariant=is_invariant: decode(ceilings, is_invariant=is_invariant),  # type: ignore[misc]
            "prefill": lambda is_invariant=is_invariant: prefill(ceilings, layers, is_invariant=is_invariant),  # type: ignore[misc]
        }
        for name, work in works.items():
            try:
                made = work()
            except Exception as error:  # noqa: BLE001 - said, and the next is timed
                say(f"{name} step, measured", mode=mode, failed=f"{type(error).__name__}: {str(error)[-300:]}")
            else:
                say(f"{name} step, measured", mode=mode, **made)
                took[name][mode] = made["step_ms"]
            torch.cuda.empty_cache()
    for name, by_mode in took.items():
        if len(by_mode) > 1:
            say(f"{name} step, invariant over fastest", ratio=round(by_mode["invariant"] / by_mode["fastest"], 3))


def decode(ceilings: Mapping[str, float], *, is_invariant: bool) -> dict[str, Any]:
    """One verification step: 64 requests, each its newest token and three drafts, whose logits are all wanted."""
    shape, config = decode_shape(), published_config()
    each = shape.tokens // shape.requests
    drafter = random_drafter(config, CUDA, ranks=RANKS, is_invariant=is_invariant)
    weights = decode_weights(config, is_invariant=is_invariant)
    model = decode_model(config, weights, is_invariant=is_invariant, drafter=drafter)
    executor = executor_of(model)
    give_past(model)
    took = took_by(executor, drafts_step(config, requests=shape.requests, each=each, context=shape.context))
    named = {"requests": shape.requests, "drafts": each - 1, "context": shape.context}
    seconds, with_drafter = (ahead(executor, config, **named, guesses=guesses) for guesses in (False, True))
    floor = v41_work(shape).floor_seconds(ceilings)
    tokens = shape.requests * sum(ACCEPTANCE**draft for draft in range(DRAFTS + 1))
    return took | {
        "floor_ms": round(floor * 1e3, 2),
        "ratio": round(took["step_ms"] / floor / 1e3, 2),
        "tokens_per_second_at_75_percent": round(tokens / took["step_ms"] * 1e3),
        "beside": BESIDE["decode"],
        "ahead_ms": round(seconds * 1e3, 3),
        "idle_share": round(max(0.0, 1 - took["step_ms"] / seconds / 1e3), 4),
        "ahead_with_drafter_ms": round(with_drafter * 1e3, 3),
    }


def decode_weights(config: V41Config, *, is_invariant: bool) -> GpuV41Weights:
    """Of one rank."""
    placement = one_rank_of(config, RANKS)
    experts: ExpertFormat = "fp8" if is_invariant else "fp4"  # as the product keeps them on this GPU
    return random_weights(config, CUDA, experts=experts, placement=placement, is_invariant=is_invariant)


def decode_model(
    config: V41Config, weights: GpuV41Weights, *, is_invariant: bool, drafter: DrafterWeights | None = None
) -> GpuV41:
    """With room for the requests of a decode step, which is captured."""
    shape = decode_shape()
    return random_model(
        config,
        weights,
        CUDA,
        num_blocks=1 + shape.requests * -(-shape.context // config.block_tokens),
        num_windows=1 + shape.requests,
        is_invariant=is_invariant,
        graph_sizes=(shape.tokens,),
        drafter=drafter,
    )


def drafts_step(config: V41Config, *, requests: int, each: int, context: int) -> Batch:
    """Sequence n has window n + 1 and blocks of its own, and ends at `context` with `each` tokens."""
    per_table = -(-context // config.block_tokens)
    return Batch(
        tuple(
            Row(
                sequence,
                [(sequence * 31 + at * 7 + 5) % config.vocab_size for at in range(each)],
                context - each,
                range(1 + sequence * per_table, 1 + (sequence + 1) * per_table),
                GREEDY,
                window=1 + sequence,
                preceding=(11, 12, 13),
                num_drafts=each - 1,
            )
            for sequence in range(requests)
        )
    )


def ahead(
    executor: Executor, config: V41Config, *, requests: int, drafts: int, context: int, guesses: bool = False
) -> float:
    """Seconds of a step when each is launched before it is known how many drafts of the one before were right.

    guesses: drafts are the drafter's own, made behind every step; else they are given.
    """
    per_table = -(-context // config.block_tokens)
    guess = [(at * 7 + 5) % config.vocab_size for at in range(drafts)]

    def rows(positions: Sequence[int], newest: int) -> Batch:
        return Batch(
            tuple(
                Row(
                    sequence,
                    (newest, *([PENDING] * drafts if guesses and newest == PENDING else guess)),
                    position,
                    range(1 + sequence * per_table, 1 + (sequence + 1) * per_table),
                    GREEDY,
                    window=1 + sequence,
                    preceding=(11, 12, 13),
                    num_drafts=drafts,
                    wants_drafts=guesses,
                )
                for sequence, position in enumerate(positions)
            )
        )

    each = 1 + drafts
    positions = [context - (_AHEAD_STEPS + 1) * each] * requests
    for sequence in range(requests):  # windows go on from where they are told
        executor.write_window(1 + sequence, executor.read_window(1 + sequence))
    running = executor.launch(rows(positions, 5))
    start = time.perf_counter()
    for _ in range(_AHEAD_STEPS - 1):
        launched = executor.launch(rows([position + each for position in positions], PENDING))
        sampled = executor.collect(running)
        positions = [at + 1 + len(row.accepted) for at, row in zip(positions, sampled, strict=True)]
        running = launched
    executor.collect(running)
    return (time.perf_counter() - start) / _AHEAD_STEPS


def prefill(ceilings: Mapping[str, float], layers: int, *, is_invariant: bool) -> dict[str, Any]:
    """One chunk of one prompt through encoder layers alone."""
    shape = replace(prefill_shape(), layers=layers)
    config = published_config(layers, layers)
    weights = prefill_weights(config, is_invariant=is_invariant)
    model, batch = prefill_model(config, weights, is_invariant=is_invariant), chunk(config)
    executor = executor_of(model)
    took = took_by(executor, batch, before=lambda: model.reset_window(1))
    floor = v41_work(shape).floor_seconds(ceilings)
    seconds = took["step_ms"] / 1e3
    return took | {
        "layers": layers,
        "floor_ms": round(floor * 1e3, 2),
        "share_of_floor": round(floor / seconds, 3),
        "tokens_per_second_of_20_layers": round(shape.tokens / seconds * layers / prefill_shape().layers),
        "beside": BESIDE["prefill"],
    }


def prefill_weights(config: V41Config, *, is_invariant: bool) -> GpuV41Weights:
    """With all experts."""
    return random_weights(config, CUDA, experts="fp4", placement=None, is_invariant=is_invariant)


def prefill_model(config: V41Config, weights: GpuV41Weights, *, is_invariant: bool) -> GpuV41:
    """With room for one chunk."""
    blocks = prefill_shape().tokens // config.block_tokens
    return random_model(
        config, weights, CUDA, num_blocks=1 + blocks, num_windows=2, is_invariant=is_invariant, graph_sizes=()
    )


def chunk(config: V41Config) -> Batch:
    """One prompt's first."""
    tokens = prefill_shape().tokens
    ids = [(index * 7919 + 17) % config.vocab_size for index in range(tokens)]
    return Batch((Row(0, ids, 0, range(1, 1 + tokens // config.block_tokens), window=1),))


def executor_of(model: GpuV41) -> Executor:
    """The one door to it, for a model of random weights."""
    return Executor(
        model,
        model_dir=Path(tempfile.gettempdir()),
        num_blocks=model.cache.num_blocks,
        num_windows=model.cache.num_windows,
        replay="off",
        threads=1,
        weights_digest=bytes(32),
    )


def took_by(executor: Executor, batch: Batch, *, before: Callable[[], None] | None = None) -> dict[str, Any]:
    """Milliseconds of a step on the device alone, in the loop that waits, and of the host alone."""
    begin = before or (lambda: None)
    begin()
    executor.collect(executor.launch(batch))
    device, waiting, host = [], [], []
    for _ in range(_REPEATS):
        begin()
        torch.cuda.synchronize()
        start = time.perf_counter()
        launched = executor.launch(batch)
        middle = time.perf_counter()
        executor.collect(launched)
        waiting.append(time.perf_counter() - start)
        host.append(middle - start)
        device.append(_on_device(executor, batch, begin))
    return {
        "step_ms": round(statistics.median(device) * 1e3, 3),
        "waiting_ms": round(statistics.median(waiting) * 1e3, 3),
        "host_ms": round(statistics.median(host) * 1e3, 3),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def _on_device(executor: Executor, batch: Batch, begin: Callable[[], None]) -> float:
    """Seconds of a step when several are enqueued behind a long wait."""
    start, end = timed_event(), timed_event()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call] # noqa: SLF001 - no public name
    start.record()
    for _ in range(_IN_FLIGHT):
        begin()
        executor.launch(batch)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _IN_FLIGHT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=["invariant", "fastest"])
    parser.add_argument("--layers", type=int, default=14, help="of prefill: the encoder has 20, 14 fit in 141 GB")
    parser.add_argument("--out", type=Path, help="folder for gpu_v41_step.json")
    asked = parser.parse_args()
    ceilings, lines = yardsticks(), []

    def say(figure: str, **facts: object) -> None:
        lines.append({"figure": figure, **facts})
        print(json.dumps(lines[-1]), flush=True)

    print(json.dumps({"machine": machine(), **ceilings}), flush=True)
    time_steps(say, ceilings, modes=asked.modes, layers=asked.layers)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        command = f"python -m bench.gpu_v41_step --layers {asked.layers}"
        document = {"machine": machine(), "command": command, "yardsticks": ceilings, "figures": lines}
        (asked.out / "gpu_v41_step.json").write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any("failed" in line for line in lines) else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
