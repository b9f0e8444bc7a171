"""What does one layer of V4.1 do with a step on a GPU, kernel by kernel?

The same model as `kernels.models.v41.layer`, cut where kernels are: between two sublayers one kernel adds an output to
the streams, mixes them for the next and normalises, so a layer takes and leaves streams with an output beside them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.models.gpu.v41.expert_weights import Experts
from kernels.models.gpu.v41.selection import Indexer
from kernels.models.gpu.v41.step import Fetched, Products, Rows, State, Step, coefficients_of
from kernels.models.gpu.v41.weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWindowWeights,
    LayerWeights,
    Matrix,
    MemoryWeights,
    MoeWeights,
)
from kernels.models.v41.config import MoeConfig, V41Config
from kernels.ops import gpu_grouped_fp8, gpu_grouped_packed, gpu_placed_rows
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_bring import bring, wanted
from kernels.ops.gpu_engram import add_memory, read_rows, table_rows
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, gathered, grouped_product, span_rows
from kernels.ops.gpu_grouped import Groups, Weights, multiply, multiply_gated
from kernels.ops.gpu_grouped_unpack import Packed
from kernels.ops.gpu_hyper import Entered, MixingWeights, enter, leave
from kernels.ops.gpu_moe import combine, group
from kernels.ops.gpu_quant import norm_fp8
from kernels.ops.gpu_records import compress_entries, store_index, store_main, store_ring, window_records
from kernels.ops.gpu_router import Placed, route_rows
from kernels.ops.gpu_sparse import attend, attend_groups
from kernels.ops.gpu_swiglu_rows import swiglu_rows, weigh_rows
from kernels.ops.hyper import STREAMS


class Layer:
    """One main layer."""

    def __init__(self, config: V41Config, weights: LayerWeights, *, layer: int) -> None:
        self._config, self._weights, self._layer = config, weights, layer
        self._ratio = config.compress_ratios[layer]
        self._enters_decoder = layer == config.num_encoder_layers
        self._has_features = layer in config.drafter.target_layers
        self._attention = Attention(config, weights.attention, layer=layer)
        self._indexer = Indexer(config, weights.indexer, layer=layer) if weights.indexer else None
        self._compressor = Compressor(config, weights.compressor, layer=layer) if weights.compressor else None

    def fetch(self, step: Step, compressed: Tensor, *, is_aside: bool) -> None:
        """Read the rows of this layer's n-gram table, if it has one, from the host's memory on the current stream.

        compressed: [tokens, reach + 1] int64 ids.  is_aside: the layers run on another stream.
        """
        if memory := self._weights.memory:
            rows = read_rows(table_rows(compressed, memory.numbers), memory.data, memory.scale)
            arrived = torch.cuda.Event() if is_aside else None  # type: ignore[no-untyped-call] # torch's stub
            if arrived is not None:
                arrived.record()
            step.memories[self._layer] = Fetched(rows, arrived)

    def run(self, step: Step, state: State) -> State:
        """Fewer tokens come out where the decoder begins."""
        if memory := self._weights.memory:
            state = self._remember(step, memory, state)
        weights = self._weights
        entered = enter_attention(step.products, state, weights.attention_mixing, weights.attention, step.late)
        if self._compressor:
            self._compressor.run(step, entered.x)
        if self._enters_decoder:
            step.enter_decoder()
            if (kept := step.laid.told.kept) is not None:
                step.late.join()
                entered = _of(entered, kept)
        if self._has_features:
            step.features.append(_mean(entered.streams[step.half.stored]))
        output = self._attend(step, entered)
        entered = enter_experts(step.products, entered, output, weights.ffn_mixing, weights.moe, step.late)
        output = experts(step, self._config.moe, weights.moe, entered)
        return State(entered.streams, output, entered.made)

    def _remember(self, step: Step, memory: MemoryWeights, state: State) -> State:
        """The memory wants the streams with the output in them."""
        streams = state.streams if state.output is None else leave(state.streams, state.output, state.made)
        read = step.products.of(step.memories.pop(self._layer).wait(), memory.wkv)
        streams = add_memory(streams, read, memory.gate, step.is_image, eps=self._config.norm_eps)
        return State(streams, None, state.made)

    def _attend(self, step: Step, entered: Entered) -> Tensor:
        latent, keys = self._attention.projected(step.products, entered)
        if self._indexer:
            self._indexer.run(step, entered.x, latent)
        return self._attention.run(step, latent, keys)


class Attention:
    """One layer's attention, windows and chosen entries together."""

    def __init__(self, config: V41Config, weights: AttentionWeights, *, layer: int) -> None:
        self._config, self._weights, self._layer = config, weights, layer
        self._ratio = config.compress_ratios[layer]
        self._scale = config.head_dim**-0.5

    def projected(self, products: Products, entered: Entered) -> tuple[Rows, Tensor]:
        """[tokens, hidden] (fp8) -> latents [tokens, q_lora], keys [tokens, head_dim] bf16, not yet normalised.

        Queries come from latents, the indexer's too.
        """
        return projected(products, self._weights, entered, eps=self._config.norm_eps)

    def run(self, step: Step, latent: Rows, keys: Tensor) -> Tensor:
        """Returns [tokens, hidden] bf16; keys go to the ring."""
        config, weights, half, products = self._config, self._weights, step.half, step.products
        cos, sin = half.turns[self._ratio > 0]
        with step.beside.begun(keys):
            own = window_records(keys, weights.kv_norm, cos, sin, eps=config.norm_eps)
        queries = products.of(latent, weights.wq_b, follows_rows=True)
        queries = queries.view(len(latent), config.num_heads, config.head_dim)
        step.beside.join()
        ring, chosen = step.records.rings[self._layer], step.chosen if self._ratio else None
        given = queries, cos, sin, own, ring, half.windows, chosen, weights.sinks
        by_group: Tensor | SpanRows
        if isinstance(weights.wo_a, RowScaled):
            span = gpu_grouped_fp8.span_of(weights.wo_a.size)
            brings = wanted("wo_a", weights.wo_a.data)
            by_group = attend_groups(*given, half.groups, scale=self._scale, span=span, brings=brings)
        else:
            by_group = attend(*given, scale=self._scale).view(len(latent), config.o_groups, -1)
        # Only now: new keys take the places of some that these tokens have just seen.
        with step.beside.begun(own):
            store_ring(own, ring, half.stored, half.stored_slots, half.stored_places)
        made = products.grouped(by_group, weights.wo_a, half.groups)
        bring_beside(step.late, "wo_b", weights.wo_b)
        return products.of(products.rounded(made, weights.wo_b), weights.wo_b)


def projected(products: Products, weights: AttentionWeights, entered: Entered, *, eps: float) -> tuple[Rows, Tensor]:
    """Latents of queries, normalised, and keys: what an attention makes of its input in one product."""
    both = products.of(entered.seen_by(weights.down), weights.down)
    size = len(weights.q_norm)
    return products.normed(both[:, :size], weights.q_norm, weights.wq_b, eps=eps), both[:, size:]


class Compressor:
    """One KV source: an entry for every token, or for every two."""

    def __init__(self, config: V41Config, weights: CompressorWeights, *, layer: int) -> None:
        self._config, self._weights, self._layer = config, weights, layer
        self._ratio = config.compress_ratios[layer]

    def run(self, step: Step, x: Tensor) -> None:
        """Write the entries that these tokens complete.  x: [tokens, hidden] bf16, normalised, of the whole step."""
        weights, eps, laid = self._weights, self._config.norm_eps, step.laid
        source, entries = step.records.sources[self._layer], laid.entries[self._ratio]
        projected = step.products.wide(x, weights.project)
        latents = compress_entries(
            projected, source.pairs, entries.sources, laid.pair_slots, laid.pair_places, weights.norm, eps=eps
        )
        if source.pairs is not None:  # only now: the earlier token of a pair may have had one of these places
            tokens = torch.arange(len(x), device=x.device)
            rows = projected.view(torch.uint8)
            store_ring(rows, source.pairs, tokens, laid.pair_stored_slots, laid.pair_stored_places)
        index = step.products.of(latents, weights.index)
        cos, sin = entries.turn
        data, scale = source.keys.data, source.keys.scale
        store_main(latents, cos, sin, source.main, entries.blocks, entries.places)
        store_index(index, weights.index_norm, cos, sin, data, scale, entries.blocks, entries.places, eps=eps)


class Routed(Protocol):
    """Tokens on their way through experts, of the main model or of its drafter."""

    @property
    def products(self) -> Products:
        """How rows are multiplied."""

    @property
    def lines(self) -> Tensor:
        """[tokens] int32; -1 for padding."""

    @property
    def is_image(self) -> Tensor | None:
        """[tokens] bool; None = none."""

    @property
    def beside(self) -> Beside:
        """Where the shared expert is asked."""

    @property
    def late(self) -> Beside:
        """Where what the end of a sublayer wants is made."""


def experts(step: Routed, moe: MoeConfig, weights: MoeWeights, entered: Entered) -> Tensor:
    """Router, the experts of this GPU, and the shared expert: [tokens, hidden] bf16.

    What experts elsewhere would add is left out.
    """
    products, beside, limit = step.products, step.beside, moe.swiglu_limit
    with beside.begun():
        shared = _shared(products, weights, entered, limit=limit)
    given = entered.x, weights.router, weights.bias, weights.image_bias, step.is_image, Placed(weights.rows, step.lines)
    routes = route_rows(*given, top_k=moe.top_k, scaling=moe.scaling, is_invariant=products.is_invariant)
    groups, placed_rows = _grouped(weights, entered, routes.experts)
    factors = routes.weights.flatten()
    rows, is_in_order = routed(products, weights, entered, groups, factors, limit=limit, placed=placed_rows)
    beside.join()
    step.late.join()  # whoever takes what comes out needs not know of it
    places = None if is_in_order else groups.places
    return combine(rows, shared, routes.experts, top_k=moe.top_k, places=places)


def _shared(products: Products, weights: MoeWeights, entered: Entered, *, limit: float) -> Tensor:
    """What every token's expert makes of it: [tokens, hidden] bf16."""
    both = products.of(entered.seen_by(weights.shared_up), weights.shared_up)
    return products.of(products.gated(both, weights.shared_down, limit=limit), weights.shared_down)


def _grouped(weights: MoeWeights, entered: Entered, experts: Tensor) -> tuple[Groups, SpanRows | None]:
    """Slots sorted by expert, and the experts' rows where one launch does both."""
    up, rows, slots = weights.up, entered.restated, experts.numel()
    is_few = gpu_placed_rows.takes(slots)
    if is_few and rows is not None and not isinstance(up, Weights) and _is_worth(up, slots):
        return gpu_placed_rows.place_rows(experts, rows, num_experts=up.experts, turns=_turns(up))
    return group(experts, num_experts=up.experts), None


def routed(
    products: Products,
    weights: MoeWeights,
    entered: Entered,
    groups: Groups,
    factors: Tensor,
    *,
    limit: float,
    placed: SpanRows | None = None,
) -> tuple[Tensor, bool]:
    """What experts make of each slot's row, [slots, hidden] bf16, and whether it lies in the order of slots.

    factors: [slots] fp32.  placed: each position's row, turned, where that is done.  Else it lies in the order of
    positions.
    """
    up, down, slots = weights.up, weights.down, len(factors)
    if isinstance(up, RowScaled) and isinstance(down, RowScaled) and products.is_invariant:
        spans = [gpu_grouped_fp8.span_of(each.size) for each in (up, down)]
        x = span_rows(entered.rounded, groups.sources, span=spans[0])
        gated = gpu_grouped_fp8.multiply_gated(x, up, groups, factors, limit=limit)
        return gpu_grouped_fp8.multiply(span_rows(gated, span=spans[1]), down, groups, num_out=slots), True
    if not isinstance(up, Weights) and entered.restated is not None and _is_worth(up, slots):
        assert not isinstance(down, Weights), "both matrices of an expert are kept alike"
        turns = _turns(up)
        x = gathered(entered.restated, groups.sources, turns=turns) if placed is None else placed
        if isinstance(up, Packed) and up.is_interleaved:
            gated = gpu_grouped_packed.multiply_gated(x, up, groups.ends, limit=limit)
            middle = weigh_rows(gated, groups.targets, factors, turns=turns, follows_product=turns)
        else:
            both = _on_units(x, up, groups.ends)
            middle = swiglu_rows(both, groups.targets, factors, limit=limit, turns=turns, follows_product=turns)
        return _on_units(middle, down, groups.ends, follows_gate=turns), False
    assert not isinstance(up, Packed) or not up.is_interleaved, "rows of gate and of up are for fp8 units"
    plain_up, plain_down = (each.weights if isinstance(each, Packed) else each for each in (up, down))
    assert isinstance(plain_up, Weights), "e4m3 experts are multiplied by fp8 units"
    assert isinstance(plain_down, Weights), "both matrices of an expert are kept alike"
    hidden = multiply_gated(entered.rounded, plain_up, groups, factors, limit=limit, num_out=slots)
    return multiply(hidden, plain_down, Groups(groups.ends, groups.targets, groups.targets), num_out=slots), True


def _on_units(x: SpanRows, matrices: RowScaled | Packed, ends: Tensor, *, follows_gate: bool = False) -> Tensor:
    """Rows times their own experts' matrices on the fp8 units: fp4 in registers, or in room, or e4m3 as it lies.

    follows_gate: as for `gpu_grouped_packed`.
    """
    if isinstance(matrices, Packed):
        if matrices.room is None:
            return gpu_grouped_packed.multiply(x, matrices.weights, matrices.powers, ends, follows_gate=follows_gate)
        matrices = matrices.unpacked()  # into the room of the one before, which has been multiplied
    return grouped_product(x, matrices, ends)


def _is_worth(up: RowScaled | Packed, positions: int) -> bool:
    return isinstance(up, RowScaled) or up.is_worth(positions)


def _turns(up: Experts) -> bool:
    return isinstance(up, Packed) and up.room is None


def enter_attention(
    products: Products, state: State, mixing: MixingWeights, attention: AttentionWeights, late: Beside
) -> Entered:
    """From the experts, or from what is embedded, to the attention."""
    is_invariant, restates = products.is_invariant, isinstance(attention.down, RowScaled)
    bring_beside(late, "down", attention.down)
    given = state.streams, state.output, state.made, mixing
    return enter(*given, is_invariant=is_invariant, restates=restates, beside=late)


def enter_experts(
    products: Products,
    entered: Entered,
    output: Tensor,
    mixing: MixingWeights,
    moe: MoeWeights,
    late: Beside | None = None,
) -> Entered:
    """From the attention to the experts; fp8 products want rows under one scale each."""
    is_invariant, streams = products.is_invariant, entered.streams
    restates = not is_invariant or _turns(moe.up) or isinstance(moe.shared_up, RowScaled)
    if late is not None:
        bring_beside(late, "shared", moe.router, moe.shared_up)
    return enter(streams, output, entered.made, mixing, is_invariant=is_invariant, restates=restates, beside=late)


def bring_beside(late: Beside, place: str, *matrices: Matrix) -> None:
    """Have these come into the L2 from now on, where that is worth it."""
    data = [wanted(place, each.data) for each in matrices]  # of a plain matrix, itself
    if any(each is not None for each in data):
        with late.begun():
            bring(*data)


def write_draft_windows(step: Step, config: V41Config, weights: DraftWindowWeights) -> None:
    """The rings of all drafter layers, for the tokens whose features were kept."""
    half, products, eps = step.half, step.products, config.norm_eps
    main = products.of(products.rounded(torch.cat(step.features, dim=1), weights.project), weights.project)
    rows = norm_fp8(main, weights.norm, eps=eps)[1]
    cos, sin = (turn[half.stored] for turn in half.turns[False])
    tokens = torch.arange(len(rows), device=rows.device)
    for index, (wkv, norm) in enumerate(weights.layers):
        records = window_records(products.of(rows, wkv), norm, cos, sin, eps=eps)
        ring = step.records.rings[config.num_layers + index]
        store_ring(records, ring, tokens, half.stored_slots, half.stored_places)


def _of(entered: Entered, rows: Tensor) -> Entered:
    return Entered(entered.streams[rows], entered.x[rows], entered.rounded[rows], coefficients_of(entered.made, rows))


def _mean(streams: Tensor) -> Tensor:
    """[tokens, 4, hidden] bf16 -> [tokens, hidden] bf16, added in order."""
    total = streams[:, 0].float()
    for stream in range(1, STREAMS):
        total += streams[:, stream]
    return (total * (1.0 / STREAMS)).bfloat16()
