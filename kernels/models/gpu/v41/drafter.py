"""How do the drafter's layers and heads run on a GPU? The formulas are kernels.models.drafter's, by the main kernels.

Its layers are like main layers, but a sequence's places all see each other: to the attention kernel each of them stands
at the last place, with a window that reaches back as far as the first one's. Nothing is stored: a draft's own keys are
read where they were made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.models.gpu.v41.expert_weights import ExpertFormat, Placement, Tensors
from kernels.models.gpu.v41.layer import enter_attention, enter_experts, experts, projected
from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.step import Products, State
from kernels.models.gpu.v41.tokens import Turn, Turns
from kernels.models.gpu.v41.weights import AttentionWeights, Loader, MoeWeights
from kernels.models.v41.config import V41Config
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_grouped import interleaved
from kernels.ops.gpu_hyper import Entered, MixingWeights, enter, split_weight
from kernels.ops.gpu_records import Section, window_records
from kernels.ops.gpu_sparse import Windows, attend
from kernels.ops.hyper import COEFFICIENTS, STREAMS, Coefficients, collapse, first_pre


@dataclass(frozen=True, slots=True)
class DraftLayerWeights:
    """Of one drafter layer."""

    attention_mixing: MixingWeights
    attention: AttentionWeights
    ffn_mixing: MixingWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """Of the drafter, without what it shares with the main model."""

    layers: tuple[DraftLayerWeights, ...]
    last: MixingWeights
    """The final norm, dressed as a sublayer's that makes nothing of the streams."""
    markov_embedding: Tensor
    markov_head: Tensor
    """[vocab, rank] bf16 each."""
    confidence: Tensor
    """[hidden + rank] fp32."""


class DrafterLoader(Loader):
    """Reads the `mtp.` weights of one checkpoint."""

    def __init__(
        self,
        config: V41Config,
        tensors: Tensors,
        device: torch.device,
        *,
        experts: ExpertFormat,
        placement: Placement | None = None,
        is_invariant: bool = True,
    ) -> None:
        """placement: of the drafter's own experts; None = all are here."""
        config = replace(config, moe=config.drafter.moe)
        super().__init__(config, tensors, device, experts=experts, placement=placement, is_invariant=is_invariant)

    def load_drafter(self) -> DrafterWeights:
        """Every tensor, layer by layer."""
        config, drafter = self._config, self._config.drafter
        last = f"mtp.{drafter.num_layers - 1}."
        nothing = torch.zeros(COEFFICIENTS, STREAMS * config.hidden_size, device=self._device)
        return DrafterWeights(
            layers=tuple(self._draft_layer(f"mtp.{index}.") for index in range(drafter.num_layers)),
            last=MixingWeights(
                split_weight(nothing),
                torch.zeros(3, device=self._device),
                torch.zeros(COEFFICIENTS, device=self._device),
                self._fp32(f"{last}norm.weight"),
                config.norm_eps,
                config.hc_eps,
                config.sinkhorn_iters,
            ),
            markov_embedding=self._bf16(f"{last}markov_head.embed.weight"),
            markov_head=self._bf16(f"{last}markov_head.head.weight"),
            confidence=self._fp32(f"{last}confidence_head.proj.weight").flatten(),
        )

    def _draft_layer(self, prefix: str) -> DraftLayerWeights:
        return DraftLayerWeights(
            self._mixing(prefix, "attn"),
            self._attention(f"{prefix}attn."),
            self._mixing(prefix, "ffn"),
            self._moe(f"{prefix}ffn."),
        )


@dataclass(frozen=True, slots=True)
class Drafting:
    """The places of all sequences that want drafts, place after place, sequence after sequence."""

    products: Products
    lines: Tensor
    """[places] int32, -1 for those of padding."""
    windows: Windows
    turn: Turn
    beside: Beside
    """Where the shared expert is asked."""
    late: Beside
    """Where what a sublayer's end wants is made."""
    is_image: Tensor | None = None
    """None: nobody drafts images."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the layers make of each sequence, before any token is drafted."""

    hidden: Tensor
    """[sequences, places, hidden] bf16, before the final norm."""
    base: Tensor
    """[sequences, places, vocab] fp32 logits that know nothing of the other places' tokens."""


class GpuDrafter:
    """The drafter's layers and heads, on the main model's embedding, output head and windows."""

    def __init__(
        self,
        config: V41Config,
        weights: DrafterWeights,
        records: Records,
        turns: Turns,
        *,
        embedding: Tensor,
        head: Tensor,
        products: Products,
        temperatures: tuple[float, ...] = (),
    ) -> None:
        """records: of the main model's windows.  turns: of positions up to the last that drafts can have.

        embedding, head: [vocab, hidden] bf16.  temperatures: what calibration divides each place's confidence logit by.
        """
        drafter = config.drafter
        if len(temperatures) not in {0, drafter.draft_tokens}:
            raise ValueError(f"{len(temperatures)} confidence temperatures for {drafter.draft_tokens} draft places")
        self._config, self._weights, self._turns, self._products = config, weights, turns, products
        self._embedding, self._head = embedding, head
        self._temperatures = temperatures or (1.0,) * drafter.draft_tokens
        self._layers = tuple(
            _DraftLayer(config, each, records.rings[config.num_layers + index])
            for index, each in enumerate(weights.layers)
        )
        self._beside, self._late = Beside(embedding.device), Beside(embedding.device)
        self.places = drafter.draft_tokens

    def propose(self, newest: Tensor, positions: Tensor, slots: Tensor, window_from: Tensor) -> Proposal:
        """Run the layers over all places of all sequences; nothing is waited for.

        newest: [sequences] int, each one's newest token, which the main model has not computed.  positions: [sequences]
        int64, of that token.  slots: [sequences] int64 windows, -1 for padding.  window_from: [sequences] int64, below
        which the drafter's windows hold nothing.
        """
        drafter, places = self._config.drafter, self.places
        ids = torch.full((len(newest), places), drafter.noise_token_id, dtype=torch.int64, device=newest.device)
        ids[:, 0] = newest
        at = self._lay_out(positions, slots, window_from)
        x = self._embedding[ids.flatten()]
        pre = first_pre(len(x), x.device)
        state = State(x.unsqueeze(1).repeat(1, STREAMS, 1), None, Coefficients(pre, pre, pre))
        for layer in self._layers:
            state = layer.run(at, state)
        is_invariant = self._products.is_invariant
        ended = enter(state.streams, state.output, state.made, self._weights.last, is_invariant=is_invariant)
        hidden = collapse(ended.streams.float(), state.made.pre).bfloat16()
        base = self._products.wide(ended.x, self._head)
        return Proposal(hidden.view(len(newest), places, -1), base.view(len(newest), places, -1))

    def after(self, proposal: Proposal, place: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [sequences, vocab] fp32 and confidences [sequences] fp32 of one place.

        tokens: [sequences] int, the token before it in each sequence.
        """
        weights = self._weights
        before = weights.markov_embedding[tokens.long()]
        logits = proposal.base[:, place] + self._products.wide(before, weights.markov_head)
        evidence = torch.cat([proposal.hidden[:, place].float(), before.float()], dim=1) * weights.confidence
        return logits, torch.sigmoid(evidence.sum(dim=1) / self._temperatures[place])

    def _lay_out(self, positions: Tensor, slots: Tensor, window_from: Tensor) -> Drafting:
        config, places, device = self._config, self.places, positions.device
        place = torch.arange(places, device=device)
        own = (positions[:, None] + place).flatten()
        firsts, slots = positions.repeat_interleave(places), slots.repeat_interleave(places)
        lowest = torch.maximum(positions - config.window_tokens, window_from.clamp_min(0)).repeat_interleave(places)
        starts = torch.arange(len(own), device=device) // places * places
        return Drafting(
            products=self._products,
            lines=slots.int(),
            windows=Windows(
                positions=firsts + (places - 1),
                lowest=lowest,
                begins=firsts,
                starts=starts,
                slots=slots,
                window_tokens=config.window_tokens + places,
                ring_tokens=config.ring_tokens,
            ),
            # A sequence that ends here has no use for drafts beyond the last position.
            turn=self._turns.at(own.clamp_max(len(self._turns.plain[0]) - 1), compressed=False),
            beside=self._beside,
            late=self._late,
        )


class _DraftLayer:
    """One layer: like a main layer without compressed entries."""

    def __init__(self, config: V41Config, weights: DraftLayerWeights, ring: Section) -> None:
        self._config, self._weights, self._ring = config, weights, ring
        self._scale = config.head_dim**-0.5

    def run(self, at: Drafting, state: State) -> State:
        weights = self._weights
        entered = enter_attention(at.products, state, weights.attention_mixing, weights.attention, at.late)
        output = self._attend(at, entered)
        entered = enter_experts(at.products, entered, output, weights.ffn_mixing, weights.moe, at.late)
        output = experts(at, self._config.drafter.moe, weights.moe, entered)
        return State(entered.streams, output, entered.made)

    def _attend(self, at: Drafting, entered: Entered) -> Tensor:
        config, weights, products = self._config, self._weights.attention, at.products
        cos, sin = at.turn
        latent, keys = projected(products, weights, entered, eps=config.norm_eps)
        own = window_records(keys, weights.kv_norm, cos, sin, eps=config.norm_eps)
        queries = products.of(latent, weights.wq_b).view(len(latent), config.num_heads, config.head_dim)
        attended = attend(queries, cos, sin, own, self._ring, at.windows, None, weights.sinks, scale=self._scale)
        groups = interleaved(len(latent), config.o_groups, keys.device)
        by_group = attended.view(len(latent), config.o_groups, -1)
        made = products.grouped(by_group, weights.wo_a, groups)
        return products.of(products.rounded(made, weights.wo_b), weights.wo_b)
