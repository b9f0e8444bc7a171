"""How long does a whole V4.1 step take on one GPU, through the executor, and how far is that from its floor?

    python -m bench.gpu_v41 step                  # decode and prefill, invariant and fastest
    python -m bench.gpu_v41 step --modes fastest --layers 14

Decode: one rank of 64 (7 experts a layer in bf16, rows of all ranks), 64 requests of 1 + 3 rows at 131,072 tokens.
Prefill: a chunk of 16,384 through as many encoder layers as fit with all 384 experts in fp4. The drafter's own layers
and the exchange between ranks are not in either; everything else is, gaps between kernels too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_time import timed_event
from bench.gpu_v41_model import give_past, one_rank_of, published_config, random_model, random_weights
from bench.gpu_v41_work import decode_shape, prefill_shape
from bench.roofline_v41 import v41_work
from kernels.batch import Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.models.gpu.v41.model import GpuV41
from kernels.models.v41.config import V41Config

CUDA = torch.device("cuda")
RANKS, DRAFTS, ACCEPTANCE = 64, 3, 0.75
GREEDY = SamplingParams(temperature=0.0)
_IN_FLIGHT = 3
"""Fewer than buffers between host and device, so that the host never waits."""
_REPEATS = 7


def time_steps(say: Callable[..., None], ceilings: Mapping[str, float], *, modes: Sequence[str], layers: int) -> None:
    """layers: of the encoder, for prefill."""
    for mode in modes:
        say("decode step, measured", mode=mode, **decode(ceilings, is_invariant=mode == "invariant"))
        torch.cuda.empty_cache()
        say("prefill step, measured", mode=mode, **prefill(ceilings, layers, is_invariant=mode == "invariant"))
        torch.cuda.empty_cache()


def decode(ceilings: Mapping[str, float], *, is_invariant: bool) -> dict[str, Any]:
    """One verification step: 64 requests, each its newest token and three drafts, whose logits are all wanted."""
    shape, config = decode_shape(), published_config()
    each = shape.tokens // shape.requests
    weights = random_weights(config, CUDA, experts="bf16", placement=one_rank_of(config, RANKS))
    per_table = -(-shape.context // config.block_tokens)
    model = random_model(
        config,
        weights,
        CUDA,
        num_blocks=1 + shape.requests * per_table,
        num_windows=1 + shape.requests,
        is_invariant=is_invariant,
        graph_sizes=(shape.tokens,),
    )
    executor = _executor(model)
    give_past(model)
    took = _took(executor, drafts_step(config, requests=shape.requests, each=each, context=shape.context))
    floor = v41_work(shape).floor_seconds(ceilings)
    tokens = shape.requests * sum(ACCEPTANCE**draft for draft in range(DRAFTS + 1))
    return took | {
        "floor_ms": round(floor * 1e3, 2),
        "ratio": round(took["step_ms"] / floor / 1e3, 2),
        "tokens_per_second_at_75_percent": round(tokens / took["step_ms"] * 1e3),
    }


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
                targets=[0] * (each - 1),
            )
            for sequence in range(requests)
        )
    )


def prefill(ceilings: Mapping[str, float], layers: int, *, is_invariant: bool) -> dict[str, Any]:
    """One chunk of one prompt through encoder layers alone."""
    shape = replace(prefill_shape(), layers=layers)
    config = published_config(layers, layers)
    weights = random_weights(config, CUDA, experts="fp4", placement=None)
    blocks = shape.tokens // config.block_tokens
    model = random_model(
        config, weights, CUDA, num_blocks=1 + blocks, num_windows=2, is_invariant=is_invariant, graph_sizes=()
    )
    ids = [(index * 7919 + 17) % config.vocab_size for index in range(shape.tokens)]
    batch = Batch((Row(0, ids, 0, range(1, 1 + blocks), window=1),))
    executor = _executor(model)
    took = _took(executor, batch, before=lambda: model.reset_window(1))
    floor = v41_work(shape).floor_seconds(ceilings)
    seconds = took["step_ms"] / 1e3
    return took | {
        "layers": layers,
        "floor_ms": round(floor * 1e3, 2),
        "share_of_floor": round(floor / seconds, 3),
        "tokens_per_second_of_20_layers": round(shape.tokens / seconds * layers / prefill_shape().layers),
    }


def _executor(model: GpuV41) -> Executor:
    return Executor(
        model,
        model_dir=Path(tempfile.gettempdir()),
        num_blocks=model.cache.num_blocks,
        num_windows=model.cache.num_windows,
        replay="off",
        threads=1,
        weights_digest=bytes(32),
    )


def _took(executor: Executor, batch: Batch, *, before: Callable[[], None] | None = None) -> dict[str, Any]:
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
