"""What does one layer of V4.1 do with a step on a GPU, kernel by kernel?

The same model as `kernels.models.v41.layer`, cut where kernels are: between two sublayers one kernel adds an output to
the streams, mixes them for the next and normalises, so a layer takes and leaves streams with an output beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.models.gpu.v41.selection import Indexer
from kernels.models.gpu.v41.step import Fetched, State, Step, coefficients_of
from kernels.models.gpu.v41.weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWindowWeights,
    LayerWeights,
    MemoryWeights,
    MoeWeights,
)
from kernels.models.v41.config import MoeConfig, V41Config
from kernels.ops.gpu_engram import add_memory, read_rows, table_rows
from kernels.ops.gpu_grouped import Groups, multiply, multiply_gated
from kernels.ops.gpu_hyper import Entered, enter, leave
from kernels.ops.gpu_moe import combine, group, route
from kernels.ops.gpu_quant import norm_fp8, round_fp8, swiglu_fp8
from kernels.ops.gpu_records import compress_entries, store_index, store_main, store_ring, window_records
from kernels.ops.gpu_sparse import attend
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
        is_invariant = step.products.is_invariant
        entered = enter(
            state.streams, state.output, state.made, self._weights.attention_mixing, is_invariant=is_invariant
        )
        if self._compressor:
            self._compressor.run(step, entered.x)
        if self._enters_decoder:
            step.enter_decoder()
            if (kept := step.laid.told.kept) is not None:
                entered = _of(entered, kept)
        if self._has_features:
            step.features.append(_mean(entered.streams[step.half.stored]))
        output = self._attend(step, entered)
        entered = enter(entered.streams, output, entered.made, self._weights.ffn_mixing, is_invariant=is_invariant)
        output = experts(step, self._config.moe, self._weights.moe, entered)
        return State(entered.streams, output, entered.made)

    def _remember(self, step: Step, memory: MemoryWeights, state: State) -> State:
        """The memory wants the streams with the output in them."""
        streams = state.streams if state.output is None else leave(state.streams, state.output, state.made)
        read = step.products.of(step.memories.pop(self._layer).wait(), memory.wkv)
        streams = add_memory(streams, read, memory.gate, step.is_image, eps=self._config.norm_eps)
        return State(streams, None, state.made)

    def _attend(self, step: Step, entered: Entered) -> Tensor:
        latent = self._attention.latent(step, entered.rounded)
        if self._indexer:
            self._indexer.run(step, entered.x, latent)
        return self._attention.run(step, entered.rounded, latent)


class Attention:
    """One layer's attention, windows and chosen entries together."""

    def __init__(self, config: V41Config, weights: AttentionWeights, *, layer: int) -> None:
        self._config, self._weights, self._layer = config, weights, layer
        self._ratio = config.compress_ratios[layer]
        self._scale = config.head_dim**-0.5

    def latent(self, step: Step, rounded: Tensor) -> Tensor:
        """[tokens, hidden] bf16 (fp8) -> [tokens, q_lora] bf16 (fp8): queries come from it, the indexer's too."""
        down = step.products.of(rounded, self._weights.wq_a)
        return norm_fp8(down, self._weights.q_norm, eps=self._config.norm_eps)[1]

    def run(self, step: Step, rounded: Tensor, latent: Tensor) -> Tensor:
        """Returns [tokens, hidden] bf16; keys go to the ring."""
        config, weights, half, products = self._config, self._weights, step.half, step.products
        cos, sin = half.turns[self._ratio > 0]
        keys = products.of(rounded, weights.wkv)
        own = window_records(keys, weights.kv_norm, cos, sin, eps=config.norm_eps)
        queries = products.of(latent, weights.wq_b).view(len(latent), config.num_heads, config.head_dim)
        ring, chosen = step.records.rings[self._layer], step.chosen if self._ratio else None
        attended = attend(queries, cos, sin, own, ring, half.windows, chosen, weights.sinks, scale=self._scale)
        # Only now: new keys take the places of some that these tokens have just seen.
        store_ring(own, ring, half.stored, half.stored_slots, half.stored_places)
        by_group = attended.view(len(latent), config.o_groups, -1)
        return products.of(round_fp8(products.grouped(by_group, weights.wo_a, step.groups)), weights.wo_b)


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


def experts(step: Step, moe: MoeConfig, weights: MoeWeights, entered: Entered) -> Tensor:
    """Router, the experts of this GPU, and the shared expert: [tokens, hidden] bf16.

    What experts elsewhere would add is left out.
    """
    products, slots = step.products, len(entered.x) * moe.top_k
    logits = products.wide(entered.x, weights.router)
    routes = route(logits, weights.bias, weights.image_bias, step.is_image, top_k=moe.top_k, scaling=moe.scaling)
    here = routes.experts if weights.rows is None else weights.rows[routes.experts.long()]
    here = torch.where(step.half.lines[:, None] >= 0, here, -1)  # padding goes to no expert
    groups = group(here, num_experts=weights.up.experts)
    factors, limit = routes.weights.flatten(), moe.swiglu_limit
    gated = multiply_gated(entered.rounded, weights.up, groups, factors, limit=limit, num_out=slots)
    by_slot = Groups(groups.ends, groups.targets, groups.targets)
    down = multiply(gated, weights.down, by_slot, num_out=slots)
    both = products.of(entered.rounded, weights.shared_up)
    shared = products.of(swiglu_fp8(both, None, limit=limit), weights.shared_down)
    return combine(down, shared, here, top_k=moe.top_k)


def write_draft_windows(step: Step, config: V41Config, weights: DraftWindowWeights) -> None:
    """The rings of all drafter layers, for the tokens whose features were kept."""
    half, products, eps = step.half, step.products, config.norm_eps
    main = products.of(round_fp8(torch.cat(step.features, dim=1)), weights.project)
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
