"""What does a whole V4.1 step launch? The model's own walk through its layers, over tensors without values.

A tensor without values cannot be asked for one: that a step runs on them proves that the host waits for nothing in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from bench.gpu_v41_model import RandomTensors, one_rank_of, published_config, random_weights
from kernels.kv.layout import KvLayout
from kernels.models.gpu.v41.drafter import DrafterLoader, GpuDrafter
from kernels.models.gpu.v41.expert_weights import ExpertFormat
from kernels.models.gpu.v41.graphs import whole_extent
from kernels.models.gpu.v41.planner import extent_of
from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.stack import Stack
from kernels.models.gpu.v41.step import Products
from kernels.models.gpu.v41.tokens import Layouter, Told, Turns
from kernels.models.gpu.v41.weights import GpuV41Weights
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.models.v41.layout import v41_layout
from kernels.ops import gpu_bring
from kernels.ops.gpu_step import move_back, noise_keys
from kernels.ops.gpu_told import Say
from kernels.ops.gpu_varlen import lay_out
from kernels.ops.gpu_verify import Standing, accept
from kernels.ops.numerics import QUANT
from kernels.tests.golden_files import tiny_v41

META = torch.device("meta")
_BLOCKS, _WINDOWS, _LINES, _POSITIONS = 64, 9, 65, 4096


@dataclass(frozen=True, slots=True)
class Pools:
    """The caches' memory, as `Records` looks at it."""

    blocks: Tensor
    windows: Tensor


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model without values."""

    config: V41Config
    layout: KvLayout
    weights: GpuV41Weights


def real(experts: ExpertFormat) -> Shapes:
    """The published dimensions in fewer layers, of every kind."""
    return _shapes(published_config(12, 6, table_vocab=97), experts)


def tiny(experts: ExpertFormat) -> Shapes:
    """The golden model's."""
    return _shapes(read_v41_config(tiny_v41()), experts)


@cache
def _shapes(config: V41Config, experts: ExpertFormat) -> Shapes:
    """As one rank of many has them."""
    placement = one_rank_of(config, config.moe.num_experts // 6)
    weights = random_weights(config, META, experts=experts, placement=placement)
    return Shapes(config, v41_layout(config, QUANT), weights)


def captured_step(model: Shapes, tokens: int, context: int) -> None:
    """A step of a captured size: verified drafts of many sequences."""
    extent = whole_extent(tokens, context)
    every = torch.empty(tokens, dtype=torch.int64)
    told = Told(
        sequences=torch.empty(len(Say), 256, dtype=torch.int32)[:, :tokens],
        token_ids=torch.empty(tokens, dtype=torch.int32),
        preceding=torch.empty(tokens, 3, dtype=torch.int32),
        wanted=every,
        stored=every,
        decoder_stored=every,
        earlier=torch.empty(tokens, dtype=torch.int32),
    )
    stack, layouter = _made(model)
    stack.forward(layouter.lay(told, extent, extent))


def brought_step(model: Shapes, tokens: int, context: int) -> None:
    """The same with what each product reads asked for before it begins, wherever that can be done."""
    before, gpu_bring.PLACES = gpu_bring.PLACES, gpu_bring.ALL
    try:
        captured_step(model, tokens, context)
    finally:
        gpu_bring.PLACES = before


def chunk(model: Shapes, tokens: int, *, kept: int) -> None:
    """A prompt's last chunk with images, of which the decoder half computes some tokens only."""
    config = model.config
    images = torch.empty(9, dtype=torch.int64), torch.empty(9, config.hidden_size, dtype=torch.bfloat16)
    told = Told(
        sequences=torch.empty(len(Say), 1, dtype=torch.int32),
        token_ids=torch.empty(tokens, dtype=torch.int32),
        preceding=torch.empty(1, 3, dtype=torch.int32),
        wanted=torch.empty(1, dtype=torch.int64),
        stored=torch.empty(config.ring_tokens, dtype=torch.int64),
        decoder_stored=torch.empty(min(config.ring_tokens, kept), dtype=torch.int64),
        earlier=torch.empty(1, dtype=torch.int32),
        kept=torch.empty(kept, dtype=torch.int64),
        images=images,
    )
    stack, layouter = _made(model)
    stack.forward(layouter.lay(told, extent_of([tokens], [2 * tokens]), extent_of([kept], [2 * tokens])))


def layouts() -> None:
    """A verification step's tokens, and what passes from a step with drafts to the next."""
    counts, ends = torch.empty(2, 64, dtype=torch.int32)
    lay_out(counts, ends, num_tokens=400, tile_tokens=4)
    places = torch.empty(4, 1024, dtype=torch.int32)
    standing = Standing(places[0], places[1], places[2], torch.empty(1024, 3, dtype=torch.int32))
    move_back(places[3, :64], torch.empty(64, 3, dtype=torch.int32), places[0, :64], standing.rejected, standing.before)
    noise_keys(torch.empty(8, 400, dtype=torch.int64), standing.rejected)
    choices, rows = torch.empty(2, 4096, dtype=torch.int32), torch.empty(3, 64, dtype=torch.int32)
    accept(choices, torch.empty(400, 4, dtype=torch.int64), rows, standing)


def drafts(model: Shapes, sequences: int) -> None:
    """What the drafter's layers and heads do for some sequences: the proposal, and one place."""
    config, layout = model.config, model.layout
    pools = Pools(
        torch.empty(_BLOCKS, layout.block_bytes, dtype=torch.uint8),
        torch.empty(_WINDOWS, layout.window_bytes, dtype=torch.uint8),
    )
    turn = (torch.empty(_POSITIONS, config.rope_dims // 2), torch.empty(_POSITIONS, config.rope_dims // 2))
    placement = one_rank_of(replace(config, moe=config.drafter.moe), config.drafter.moe.num_experts // 4)
    loader = DrafterLoader(config, RandomTensors(config, META), META, experts="fp4", placement=placement)
    drafter = GpuDrafter(
        config,
        loader.load_drafter(),
        Records(config, layout, pools, torch.empty(_LINES, 8192, dtype=torch.int32)),
        Turns(turn, turn),
        embedding=model.weights.embedding,
        head=model.weights.head,
        products=Products(is_invariant=True),
    )
    newest = torch.empty(sequences, dtype=torch.int32)
    positions, slots, window_from = torch.empty(3, sequences, dtype=torch.int64)
    drafter.after(drafter.propose(newest, positions, slots, window_from), 0, newest)


def _made(model: Shapes) -> tuple[Stack, Layouter]:
    config, layout = model.config, model.layout
    tables = torch.empty(_LINES, 8192, dtype=torch.int32)
    pools = Pools(
        torch.empty(_BLOCKS, layout.block_bytes, dtype=torch.uint8),
        torch.empty(_WINDOWS, layout.window_bytes, dtype=torch.uint8),
    )
    turn = (torch.empty(_POSITIONS, config.rope_dims // 2), torch.empty(_POSITIONS, config.rope_dims // 2))
    places = torch.empty(3, 256, dtype=torch.int32)
    standing = Standing(places[0], places[1], places[2], torch.empty(256, 3, dtype=torch.int32))
    layouter = Layouter(config, Turns(turn, turn), tables, standing, places[0])
    records = Records(config, layout, pools, tables)
    ids = torch.empty(config.vocab_size, dtype=torch.int64)
    return Stack(config, model.weights, records, ids, is_invariant=True), layouter
