"""How long does a whole V4.1 step take on one GPU, through the executor, and how far is that from its floor?

    python -m bench.gpu_v41_step --out bench/results       # decode and prefill, fastest and invariant
    python -m bench.gpu_v41_step prefill --modes fastest --layers 0    # as many encoder layers as fit
    python -m bench.gpu_v41_step decode --modes invariant

Two to three minutes for each step and mode, most of it before anything is timed: stages say for what. `python -m
bench.gpu_compile` before it compiles ahead what they launch; a stage's `compiled` are those that it did not find.

Decode: one rank of 64 (7 experts a layer in e4m3, rows of all ranks), 64 requests of 1 + 3 rows at 131,072 tokens.
Prefill: a chunk of 16,384 through as many encoder layers as fit with all 384 experts in fp4. The exchange between ranks
is not in either; everything else is, gaps between kernels too. Decode is also driven as an engine does it, each step
launched before it is known how many drafts of the last one were right: what that takes beyond the device's own time is
the share that the GPU idles. Then once more with the drafter's own layers, whose guesses the next step verifies.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_lines import Lines
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
from kernels.models.gpu.memory import free_bytes
from kernels.models.gpu.v41.drafter import DrafterWeights
from kernels.models.gpu.v41.expert_weights import in_registers
from kernels.models.gpu.v41.memory import v41_need
from kernels.models.gpu.v41.model import MOST_SEQUENCES, GpuV41
from kernels.models.gpu.v41.weights import GpuV41Weights
from kernels.models.v41.config import V41Config
from kernels.models.v41.layout import v41_layout
from kernels.ops.numerics import QUANT

CUDA = torch.device("cuda")
STEPS = ("decode", "prefill")
RANKS, DRAFTS, ACCEPTANCE = 64, 3, 0.75
GREEDY = SamplingParams(temperature=0.0)
BESIDE = {"decode": "15,700 on SM100", "prefill": "60,000-89,500 on SM100"}
"""Published tokens/s/GPU of whole deployments."""
_LEAST_LAYERS = 3
"""A published layer of each kind: without entries, with memory, with entries."""
_DRAWN_BYTES = 4 << 30
"""Beside what a model is planned to take: random values before they are rounded, and torch's own workspaces."""
_AHEAD_STEPS = 24
_IN_FLIGHT = 3
"""Fewer than buffers between host and device, so that the host never waits."""
_REPEATS = 7


def time_steps(
    said: Lines, ceilings: Mapping[str, float], *, modes: Sequence[str], layers: int, steps: Sequence[str] = STEPS
) -> None:
    """layers: of the encoder, for prefill; 0 = as many as fit.  A step that fails is said, and the others are timed."""
    took: dict[str, dict[str, float]] = {step: {} for step in steps}
    for name in steps:
        for mode in modes:
            is_invariant = mode == "invariant"
            try:
                if name == "decode":
                    made = decode(said, ceilings, is_invariant=is_invariant)
                else:
                    made = prefill(said, ceilings, layers, is_invariant=is_invariant)
            except Exception as error:  # noqa: BLE001 - said, and the next is timed
                said.say(f"{name} step, measured", mode=mode, failed=f"{type(error).__name__}: {str(error)[-300:]}")
                traceback.print_exc(limit=6, file=sys.stderr)
            else:
                said.say(f"{name} step, measured", mode=mode, **made)
                took[name][mode] = made["step_ms"]
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    for name, by_mode in took.items():
        if len(by_mode) > 1:
            said.say(f"{name} step, invariant over fastest", ratio=round(by_mode["invariant"] / by_mode["fastest"], 3))


def decode(said: Lines, ceilings: Mapping[str, float], *, is_invariant: bool) -> dict[str, Any]:
    """One verification step: 64 requests, each its newest token and three drafts, whose logits are all wanted."""
    shape, config = decode_shape(), published_config()
    each = shape.tokens // shape.requests
    facts = {"step": "decode", "mode": "invariant" if is_invariant else "fastest"}
    with said.stage("weights", **facts):
        drafter = random_drafter(config, CUDA, ranks=RANKS, is_invariant=is_invariant)
        weights = decode_weights(config, is_invariant=is_invariant)
        torch.cuda.synchronize()
    with said.stage("captured", **facts):
        model = decode_model(config, weights, is_invariant=is_invariant, drafter=drafter)
    with said.stage("probed", **facts):
        executor = executor_of(model)
        give_past(model)
    with said.stage("timed", **facts):
        took = took_by(executor, drafts_step(config, requests=shape.requests, each=each, context=shape.context))
    said.say("decode step, device alone", **facts, **took)  # what comes may fail
    named = {"requests": shape.requests, "drafts": each - 1, "context": shape.context}
    with said.stage("run ahead", **facts):
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
    return random_weights(config, CUDA, experts="fp4", placement=placement, is_invariant=is_invariant)


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


def prefill(said: Lines, ceilings: Mapping[str, float], layers: int, *, is_invariant: bool) -> dict[str, Any]:
    """One chunk of one prompt through encoder layers alone."""
    layers = layers or fitting_layers(free_bytes(CUDA), is_invariant=is_invariant)
    shape = replace(prefill_shape(), layers=layers)
    config = published_config(layers, layers)
    facts = {"step": "prefill", "mode": "invariant" if is_invariant else "fastest", "layers": layers}
    with said.stage("weights", **facts):
        weights = prefill_weights(config, is_invariant=is_invariant)
        torch.cuda.synchronize()
    with said.stage("probed", **facts):
        model, batch = prefill_model(config, weights, is_invariant=is_invariant), chunk(config)
        executor = executor_of(model)
    with said.stage("timed", **facts):
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


def fitting_layers(free: int, *, is_invariant: bool) -> int:
    """How many encoder layers, with all their experts in fp4, leave room for a chunk; at least one of each kind."""
    shape = prefill_shape()
    for layers in range(shape.layers, _LEAST_LAYERS, -1):
        config = published_config(layers, layers)
        layout = v41_layout(config, QUANT)
        need = v41_need(
            config,
            layout,
            "fp4",
            step_tokens=shape.tokens,
            num_windows=2,
            num_sequences=MOST_SEQUENCES,
            is_invariant=is_invariant,
            dense_in_fp8=True,
            in_registers=in_registers(config, CUDA),
        )
        blocks = (1 + shape.tokens // config.block_tokens) * layout.block_bytes
        if need.total + blocks + _DRAWN_BYTES <= free:
            return layers
    return _LEAST_LAYERS


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
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; both otherwise")
    parser.add_argument("--modes", nargs="*", default=["fastest", "invariant"])
    parser.add_argument("--layers", type=int, default=14, help="of prefill; the encoder has 20. 0: as many as fit")
    parser.add_argument("--out", type=Path, help="folder for gpu_v41_step.json, which is written after each figure")
    asked = parser.parse_args()
    if unknown := set(asked.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}")
    ceilings = yardsticks()
    print(json.dumps({"machine": machine(), **ceilings}), flush=True)
    steps = asked.steps or list(STEPS)
    command = f"python -m bench.gpu_v41_step {' '.join(steps)} --modes {' '.join(asked.modes)} --layers {asked.layers}"
    path = asked.out / "gpu_v41_step.json" if asked.out else None
    said = Lines(path, machine=machine(), command=command, yardsticks=ceilings)
    time_steps(said, ceilings, modes=asked.modes, layers=asked.layers, steps=steps)
    return int(said.failed)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
