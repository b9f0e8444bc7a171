"""What do the steps of bench/gpu_v41_step.py launch, as Triton compiles it? Walked over tensors without values."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

from bench.gpu_v41_model import one_rank_of, published_config, random_weights
from bench.gpu_v41_work import decode_shape, prefill_shape
from kernels.models.gpu.asking import LEVELS, NUM_TOLD
from kernels.models.gpu.v41.graphs import contexts_up_to, whole_extent
from kernels.models.gpu.v41.model import MOST_SEQUENCES
from kernels.models.gpu.v41.planner import extent_of
from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.stack import Stack
from kernels.models.gpu.v41.tokens import Layouter, Told, Turns
from kernels.models.gpu.v41.weights import GpuV41Weights, LayerWeights
from kernels.models.v41.config import V41Config
from kernels.models.v41.layout import v41_layout
from kernels.ops.gpu_fp8 import RowScaled
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_grouped_unpack import Packed, Powers
from kernels.ops.gpu_sampler import draw
from kernels.ops.gpu_step import noise_keys
from kernels.ops.gpu_told import Say
from kernels.ops.gpu_verify import Standing
from kernels.ops.numerics import QUANT
from kernels.tests.gpu_compile_rig import caught, source_of

META = torch.device("meta")
_RANKS, _PROBES = 64, (1, 64)
"""Tokens of the steps that a model is known by: a single one, and forty."""
_POSITIONS = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One specialisation of a kernel."""

    name: str
    source: Any
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pools:
    """The caches' memory, as `Records` looks at it."""

    blocks: Tensor
    windows: Tensor


def sources(steps: list[str]) -> Iterator[Source]:
    """Everything that they launch, once each."""
    found: set[tuple[str, str]] = set()
    for case in cases(steps):
        for launch in caught(case):
            source, options = source_of(launch)
            key = source.hash(), repr(options)
            if key not in found:
                found.add(key)
                yield Source(launch.kernel.__name__, source, options)


def compile_source(source: Source, capability: tuple[int, int]) -> Any:
    """Down to machine code, into Triton's cache."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return triton.compile(source.source, target=target, options=source.options)


def compile_launcher(source: Source, made: Any) -> None:
    """The C that launches it, where there is a driver to link with."""
    try:
        CudaLauncher(source.source, made.metadata)
    except (AssertionError, OSError, RuntimeError, ImportError):
        if torch.version.cuda is not None:
            raise


def cases(steps: list[str]) -> Iterator[Callable[[], None]]:
    """The walks of these steps."""
    for is_invariant in (False, True):
        if "decode" in steps:
            config, shape = published_config(12, 6, table_vocab=97), decode_shape()  # layers of every kind
            walk = _Walk(config, is_invariant=is_invariant, ranks=_RANKS)
            for context in reversed(contexts_up_to(config.index_topk, config.max_position_tokens)):
                yield partial(walk.captured, shape.tokens, context)
            yield partial(_draws, shape.tokens, config.vocab_size)
            yield from (partial(walk.captured, tokens, config.index_topk) for tokens in _PROBES)
        if "prefill" in steps:
            config = published_config(6, 6, table_vocab=97)
            walk = _Walk(config, is_invariant=is_invariant, ranks=0)
            for kept in (0, config.ring_tokens):
                yield partial(walk.chunk, prefill_shape().tokens, kept)
            yield from (partial(walk.captured, tokens, config.index_topk) for tokens in _PROBES)


def _draws(lines: int, vocabulary: int) -> None:
    """Of a captured step."""
    logits, told = torch.empty(lines, vocabulary), torch.empty(NUM_TOLD, lines, dtype=torch.int64)
    rejected, out = torch.empty(2, MOST_SEQUENCES, dtype=torch.int32)[0], torch.empty(2, 4 * MOST_SEQUENCES).int()
    for level in LEVELS:
        draw(logits, noise_keys(told, rejected) if level.noise else told[:-2], level, out=out)


class _Walk:
    """A model without values."""

    def __init__(self, config: V41Config, *, is_invariant: bool, ranks: int) -> None:
        """ranks: that share the experts; 0 = all are here."""
        placement = one_rank_of(config, ranks) if ranks else None
        weights = random_weights(config, META, experts="fp4", placement=placement)
        self._config, self._layout, self._is_invariant = config, v41_layout(config, QUANT), is_invariant
        self._weights = _with_experts(_restated(weights, is_invariant=is_invariant), _packed)

    def captured(self, tokens: int, context: int) -> None:
        """A step of a captured size."""
        extent, every = whole_extent(tokens, context), torch.empty(256, dtype=torch.int64)[:tokens]
        told = Told(
            sequences=torch.empty(len(Say), 256, dtype=torch.int32)[:, :tokens],
            token_ids=torch.empty(256, dtype=torch.int32)[:tokens],
            preceding=torch.empty(256, 3, dtype=torch.int32)[:tokens],
            wanted=every,
            stored=every,
            decoder_stored=every,
            earlier=torch.empty(256, dtype=torch.int32)[:tokens],
        )
        stack, layouter = self._made()
        stack.forward(layouter.lay(told, extent, extent))

    def chunk(self, tokens: int, kept: int) -> None:
        """A prompt's.  kept: tokens that go on to a decoder half; 0 = all do."""
        ring = self._config.ring_tokens
        told = Told(
            sequences=torch.empty(len(Say), 1, dtype=torch.int32),
            token_ids=torch.empty(tokens, dtype=torch.int32),
            preceding=torch.empty(1, 3, dtype=torch.int32),
            wanted=torch.empty(1, dtype=torch.int64),
            stored=torch.empty(ring, dtype=torch.int64),
            decoder_stored=torch.empty(min(ring, kept or ring), dtype=torch.int64),
            earlier=torch.empty(1, dtype=torch.int32),
            kept=torch.empty(kept, dtype=torch.int64) if kept else None,
        )
        stack, layouter = self._made()
        encoder = extent_of([tokens], [tokens])
        stack.forward(layouter.lay(told, encoder, extent_of([kept], [tokens]) if kept else encoder))

    def _made(self) -> tuple[Stack, Layouter]:
        config, layout = self._config, self._layout
        tables = torch.empty(MOST_SEQUENCES + 1, 8192, dtype=torch.int32)
        pools = Pools(
            torch.empty(64, layout.block_bytes, dtype=torch.uint8),
            torch.empty(9, layout.window_bytes, dtype=torch.uint8),
        )
        turn = torch.empty(_POSITIONS, config.rope_dims // 2), torch.empty(_POSITIONS, config.rope_dims // 2)
        places = torch.empty(3, MOST_SEQUENCES, dtype=torch.int32)
        before = torch.empty(MOST_SEQUENCES, 3, dtype=torch.int32)
        layouter = Layouter(
            config, Turns(turn, turn), tables, Standing(places[0], places[1], places[2], before), places[0]
        )
        ids = torch.empty(config.vocab_size, dtype=torch.int64)
        records = Records(config, layout, pools, tables)
        return Stack(config, self._weights, records, ids, is_invariant=self._is_invariant), layouter


def _with_experts(weights: GpuV41Weights, change: Callable[[Any], Any]) -> GpuV41Weights:
    def changed(layer: LayerWeights) -> LayerWeights:
        return replace(layer, moe=replace(layer.moe, up=change(layer.moe.up), down=change(layer.moe.down)))

    return replace(weights, layers=tuple(changed(layer) for layer in weights.layers))


def _packed(experts: Weights) -> Packed:
    """As Hopper takes them."""
    rows = experts.experts, experts.out
    largest = torch.empty(rows, dtype=torch.uint8, device=META)
    scale, table = torch.empty(rows, device=META), torch.empty(64, 2, dtype=torch.int32, device=META)
    return Packed(experts, Powers(largest, scale, table, spread_binades=2), None)


def _rows_scaled(matrices: int, out: int, size: int) -> RowScaled:
    data = torch.empty(matrices, out, size, dtype=torch.float8_e4m3fn, device=META)
    return RowScaled(data, torch.empty(matrices, out, device=META))


def _restated(weights: GpuV41Weights, *, is_invariant: bool) -> GpuV41Weights:
    """Dense matrices as Hopper has them."""

    def matrix(wide: Any) -> RowScaled:
        return _rows_scaled(1, *wide.shape)

    def changed(layer: LayerWeights) -> LayerWeights:
        attention, moe = layer.attention, layer.moe
        groups = attention.wo_a
        assert isinstance(groups, Weights)
        return replace(
            layer,
            attention=replace(
                attention,
                down=matrix(attention.down) if is_invariant else attention.down,
                wq_b=matrix(attention.wq_b),
                wo_a=_rows_scaled(groups.experts, groups.out, groups.size),
                wo_b=matrix(attention.wo_b),
            ),
            moe=replace(moe, shared_up=matrix(moe.shared_up), shared_down=matrix(moe.shared_down)),
            indexer=layer.indexer and replace(layer.indexer, queries=matrix(layer.indexer.queries)),
            memory=layer.memory and replace(layer.memory, wkv=matrix(layer.memory.wkv)),
        )

    windows = weights.draft_windows
    return replace(
        weights,
        layers=tuple(changed(layer) for layer in weights.layers),
        draft_windows=windows and replace(windows, project=matrix(windows.project)),
    )
