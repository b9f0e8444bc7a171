"""How long does each kernel of a step take by itself, with random tensors of its shapes?

Weights are rotated past the L2. Dense models: the kernels that are served (the invariant mode), by the names that
bench/roofline.py counts them under; V4.1: the calls of bench/gpu_v41_work.py.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_shapes import GPU_SHAPES
from bench.gpu_time import graph_seconds
from bench.roofline import FUSED_ROWS
from kernels.models.config import ModelConfig, parse_config
from kernels.models.gpu.weights import heads_of
from kernels.ops.gpu_attention import CHUNK, FULL_PROGRAMS, SINGLE, attend, tokens_per_tile
from kernels.ops.gpu_linear import linear, linear_swiglu
from kernels.ops.gpu_norm import add_rms_norm
from kernels.ops.gpu_rope_cache import Paging, Turning, rope_and_store
from kernels.ops.gpu_sampler import NUM_ASKED, Features, draw
from kernels.ops.gpu_swiglu import swiglu

Calls = list[Callable[[], object]]
_BLOCK_TOKENS = 128
_CACHE_BYTES = 200_000_000
"""Weights of so many bytes in turn are not found in an L2 of 50 MB."""
_MOST_SPLITS = 32
_AT_LEAST = 24
"""Calls in a graph: launching it takes as long as a small kernel."""
_PREFILL_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Step:
    """Sequences whose newest tokens are computed; a prefill's are whole prompts."""

    config: ModelConfig
    sequences: int
    context: int
    window: int
    prefill: bool
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        return self.sequences * (self.context if self.prefill else 1)


def timed(model: str, batch: int, context: int, *, window: int, prefill: bool) -> Iterator[tuple[str, float]]:
    """Each kernel and the seconds of one call, as it is timed; one that fails is said and left out.

    A dense prefill longer than a step is timed as one step, and scaled.
    """
    scale, calls_by_name = 1.0, dict[str, Calls]()
    with torch.inference_mode():
        if model == "v41":
            from bench.gpu_v41 import build
            from bench.gpu_v41_work import decode_shape, prefill_shape

            calls_by_name = {
                work.name: work.calls for work in build(prefill_shape() if prefill else decode_shape()).work
            }
        else:
            at_once = min(batch, max(_PREFILL_TOKENS // context, 1)) if prefill else batch
            step = Step(parse_config(GPU_SHAPES[model], {}), at_once, context, window, prefill)
            scale, calls_by_name = batch / at_once, dense_calls(step)
        yield from each_timed(calls_by_name, scale)


def each_timed(calls_by_name: Mapping[str, Calls], scale: float = 1.0) -> Iterator[tuple[str, float]]:
    """Of calls, whichever fail."""
    for name, calls in calls_by_name.items():
        try:
            seconds = _seconds(calls) * scale
        except Exception as error:  # noqa: BLE001 - the other kernels must not be lost
            print(json.dumps({"kernel": name, "failed": f"{type(error).__name__}: {str(error)[-300:]}"}), flush=True)
            traceback.print_exc(limit=4, file=sys.stderr)
        else:
            yield name, seconds


def _seconds(calls: Calls) -> float:
    return graph_seconds(calls * max(_AT_LEAST // len(calls), 1))


def dense_calls(step: Step) -> dict[str, Calls]:
    """What each kernel of a dense step runs, on several weights where it has some."""
    config, tokens = step.config, step.tokens
    hidden, ffn, queries = config.hidden_size, config.ffn_size, config.num_heads * config.head_dim
    row_size = queries + 2 * config.num_kv_heads * config.head_dim
    table, ids = _noise(step, config.vocab_size, hidden), torch.arange(tokens, device=step.device) % config.vocab_size
    residual, weight = _noise(step, tokens, hidden), _noise(step, hidden)
    added, both = _noise(step, tokens, hidden), _noise(step, tokens, 2 * ffn)
    calls: dict[str, Calls] = {
        "embedding": [lambda: table[ids]],
        "qkv": _products(step, linear, tokens, row_size, hidden),
        "output": _products(step, linear, tokens, hidden, queries),
        "gate and up": _products(step, linear_swiglu if tokens <= FUSED_ROWS else linear, tokens, 2 * ffn, hidden),
        "down": _products(step, linear, tokens, hidden, ffn),
        "norms": [lambda: add_rms_norm(added, residual, weight, eps=config.norm_eps)],
        "head": _products(step, _wide, step.sequences, config.vocab_size, hidden),
        "sampler": _draws(step),
    }
    if tokens > FUSED_ROWS:
        calls["swiglu"] = [lambda: swiglu(both)]
    return calls | _attention(step, row_size)


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight, wide=True)


def _noise(step: Step, *shape: int) -> Tensor:
    return torch.randn(*shape, device=step.device, dtype=torch.bfloat16)


def _products(step: Step, run: Callable[[Tensor, Tensor], Tensor], rows: int, columns: int, depth: int) -> Calls:
    x = _noise(step, rows, depth)
    copies = max(min(_CACHE_BYTES // (2 * columns * depth), 8), 1) if step.device == "cuda" else 1

    def call(weight: Tensor) -> Callable[[], object]:
        return lambda: run(x, weight)

    return [call(_noise(step, columns, depth) * 0.02) for _ in range(copies)]


def _draws(step: Step) -> Calls:
    logits = torch.randn(step.sequences, step.config.vocab_size, device=step.device)
    asked = torch.zeros(NUM_ASKED, step.sequences, dtype=torch.int64, device=step.device)
    return [lambda: draw(logits, asked, Features())]


def _attention(step: Step, row_size: int) -> dict[str, Calls]:
    config, device, heads = step.config, step.device, heads_of(step.config)
    per_table = -(-step.context // _BLOCK_TOKENS)
    num_blocks = 1 + step.sequences * per_table
    width = config.num_kv_heads * config.head_dim
    copies = max(min(_CACHE_BYTES // (4 * num_blocks * _BLOCK_TOKENS * width), 8), 1) if device == "cuda" else 1
    layers = [_noise(step, num_blocks, 2, _BLOCK_TOKENS, width) for _ in range(copies)]
    tables = torch.zeros(step.sequences + 1, per_table, dtype=torch.int32, device=device)
    tables[1:] = (1 + torch.randperm(num_blocks - 1, device=device)).view(step.sequences, -1)
    places = [Paging(layer, tables) for layer in layers]
    first = torch.arange(step.context if step.prefill else 1, device=device)
    positions = (first + (0 if step.prefill else step.context - 1)).repeat(step.sequences).int()
    rows = torch.arange(1, step.sequences + 1, device=device).repeat_interleave(len(first)).int()
    angles = torch.rand(config.max_position_tokens, config.head_dim // 2, device=device)
    turning = Turning(angles.cos(), angles.sin())
    qkv, queries = _noise(step, step.tokens, row_size), _noise(step, step.tokens, config.num_heads * config.head_dim)
    shape = CHUNK if step.prefill else SINGLE
    splits = 1 if step.prefill else min(_MOST_SPLITS, -(-FULL_PROGRAMS // (step.sequences * config.num_kv_heads)))
    most = tokens_per_tile(heads, CHUNK) if step.prefill else 1
    starts = torch.arange(0, len(first), most, device=device)
    tiles = torch.stack(
        [
            torch.arange(1, step.sequences + 1, device=device).repeat_interleave(len(starts)),
            (torch.arange(step.sequences, device=device)[:, None] * len(first) + starts).flatten(),
            (len(first) - starts).clamp_max(most).repeat(step.sequences),
            starts.repeat(step.sequences) + (0 if step.prefill else step.context - 1),
        ],
        1,
    ).int()

    def store(place: Paging) -> Callable[[], object]:
        return lambda: rope_and_store(qkv, rows, positions, heads, turning, place)

    def see(place: Paging) -> Callable[[], object]:
        return lambda: attend(queries, tiles, heads, place, splits=splits, shape=shape, window=step.window)

    return {"rope and store": [store(place) for place in places], "attention": [see(place) for place in places]}
