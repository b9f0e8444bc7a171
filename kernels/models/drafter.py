"""Which tokens does the DSpark drafter expect next, and how sure is it of each?

The drafter's few layers see all draft places at once: the newest token and noise in the places after it, and a window
of keys made of the main model's own features (draft_window.py). A rank-limited Markov head then corrects each place by
the token drafted before it, and a confidence head tells how likely it is to be accepted. Formulas: DeepInfer's V4.1.

Drafts are guesses: verification compares them with what the main model's sampler chooses, so nothing computed here can
change an answer, only how fast it comes. They are drawn with the sampler's own noise, which makes guesses agree often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.models.model import BadBatch
from kernels.models.v41.attention import Output, Queries, WindowKeys, normed
from kernels.models.v41.cache import Ring
from kernels.models.v41.config import V41Config
from kernels.models.v41.draft_window import DraftWindows
from kernels.models.v41.head import Head
from kernels.models.v41.layer import load_moe
from kernels.models.v41.matrices import Source, product
from kernels.models.v41.mixing import Mixing
from kernels.models.v41.step import Turn
from kernels.ops.elementwise import row_sum
from kernels.ops.hyper import STREAMS, collapse, first_pre
from kernels.ops.numerics import Numerics
from kernels.ops.rope import RopeTable
from kernels.ops.sampler import Draw, Params, UnusableLogits, sample
from kernels.ops.scratch import Scratch
from kernels.ops.sparse import TOKENS, attend


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence that wants drafts."""

    token_id: int
    """Its newest token, sampled and not computed yet."""
    position: int
    """Absolute, of that token: the main model has computed all tokens before it."""
    window: int
    """Window slot."""
    params: Params
    """What its tokens are sampled with."""
    history: Sequence[int] = ()
    """All tokens including token_id; needed only with penalties."""
    num_prompt_tokens: int = 0
    """Leading part of history that is prompt."""
    window_from: int = 0
    """The drafter's windows hold nothing below this position."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What may follow a sequence's newest token, nearest first."""

    token_ids: tuple[int, ...]
    """Fewer than usual when the drafter had no usable logits."""
    confidences: tuple[float, ...]
    """Of each: chance that it is accepted if those before it are."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the drafter's layers make of each sequence, before any token is drafted."""

    hidden: Tensor
    """[sequences, places, hidden] fp32, before the final norm."""
    base: Tensor
    """[sequences, places, vocab] fp32 logits that know nothing of the other places' tokens."""


class Drafter:
    """The drafter's layers and heads, on the main model's embedding, output head and windows."""

    def __init__(
        self,
        config: V41Config,
        source: Source,
        numerics: Numerics,
        *,
        windows: DraftWindows,
        rings: Sequence[Ring],
        embedding: Tensor,
        head: Head,
        rope: RopeTable,
        temperatures: Sequence[float] = (),
    ) -> None:
        """Reads and packs the weights.  Raises NotInvariant.

        source: of the `mtp.` weights.  rings: of the drafter's layers.  embedding: [vocab, hidden].  rope: the plain
        one.  temperatures: what calibration divides each place's confidence logit by; empty = 1 everywhere.
        """
        drafter = config.drafter
        if len(temperatures) not in {0, drafter.draft_tokens}:
            raise ValueError(f"{len(temperatures)} confidence temperatures for {drafter.draft_tokens} draft places")
        self._config, self._numerics, self._rope = config, numerics, rope
        self._temperatures = tuple(temperatures) or (1.0,) * drafter.draft_tokens
        self._embedding, self._head = embedding, head
        self._layers = [
            _DraftLayer(config, source.within(str(index)), numerics, keys=keys, ring=ring)
            for index, (keys, ring) in enumerate(zip(windows.keys, rings, strict=True))
        ]
        last = source.within(str(drafter.num_layers - 1))
        self._norm = last.tensor("norm.weight")
        self._markov_embedding = last.tensor("markov_head.embed.weight")
        self._markov_head = last.matrix("markov_head.head")
        self._confidence = last.tensor("confidence_head.proj.weight")
        self._scratch = Scratch(source.packer.device)

    def draft(self, rows: Sequence[DraftRow]) -> list[Drafts]:
        """Draft for every row, each place with the token drafted before it; any grammar is left out of account.

        Raises BadBatch for a token outside the vocabulary.
        """
        if not rows:
            return []
        proposal = self.propose(rows)
        drafted: list[list[int]] = [[] for _ in rows]
        confidences: list[list[float]] = [[] for _ in rows]
        newest = [row.token_id for row in rows]
        for place in range(self._config.drafter.draft_tokens):
            logits, chances = self.after(proposal, place, newest)
            draws = [
                Draw(row.params, row.position + 1 + place, (*row.history, *tokens), row.num_prompt_tokens)
                for row, tokens in zip(rows, drafted, strict=True)
            ]
            for index, token in _sampled(logits, draws).items():
                if len(drafted[index]) == place:
                    drafted[index].append(token)
                    confidences[index].append(chances[index])
                    newest[index] = token
        return [Drafts(tuple(tokens), tuple(sure)) for tokens, sure in zip(drafted, confidences, strict=True)]

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Run the layers over all places of all rows.  Raises BadBatch for a token outside the vocabulary."""
        config, numerics = self._config, self._numerics
        seen = self._seen(rows)
        x = numerics.bf16(torch.nn.functional.embedding(self._inputs(rows), self._embedding))
        streams, pre = x.unsqueeze(1).repeat(1, STREAMS, 1), first_pre(len(x), x.device)
        for layer in self._layers:
            streams, pre = layer.run(seen, streams, pre, self._scratch)
        hidden = numerics.bf16(collapse(streams, pre))
        base = self._head.logits(normed(hidden, self._norm, config.norm_eps, numerics))
        return Proposal(hidden.view(len(rows), seen.places, -1), base.view(len(rows), seen.places, -1))

    def after(self, proposal: Proposal, place: int, tokens: Sequence[int]) -> tuple[Tensor, list[float]]:
        """Logits [sequences, vocab] fp32 and confidences of one place, given the token before it in each sequence."""
        before = self._markov_embedding[torch.tensor(tokens, device=proposal.base.device)]
        logits = proposal.base[:, place] + product(self._markov_head, before)
        evidence = row_sum(torch.cat([proposal.hidden[:, place], before], dim=1) * self._confidence)
        return logits, (evidence / -self._temperatures[place]).exp_().add_(1.0).reciprocal_().tolist()

    def _inputs(self, rows: Sequence[DraftRow]) -> Tensor:
        """Each row's newest token, then noise: [rows * places] int64."""
        for row in rows:
            if not 0 <= row.token_id < self._config.vocab_size:
                raise BadBatch(f"token {row.token_id} in front of drafts is not below {self._config.vocab_size}")
        drafter = self._config.drafter
        noise = [drafter.noise_token_id] * (drafter.draft_tokens - 1)
        return torch.tensor([[row.token_id, *noise] for row in rows], device=self._embedding.device).flatten()

    def _seen(self, rows: Sequence[DraftRow]) -> _Seen:
        """Positions and windows: the newest keys before each row's newest token, the oldest first."""
        config, device = self._config, self._embedding.device
        places, window = config.drafter.draft_tokens, config.window_tokens
        firsts = torch.tensor([row.position for row in rows])
        lowest = torch.tensor([max(row.window_from, 0) for row in rows])
        behind = firsts[:, None] + torch.arange(-window, 0)
        mask = torch.where(behind >= lowest[:, None], 0.0, float("-inf"))
        positions = (firsts[:, None] + torch.arange(places)).flatten()
        return _Seen(
            places=places,
            turn=self._rope.at(positions.to(device), int(positions.max())),
            slots=torch.tensor([row.window for row in rows], device=device).repeat_interleave(window),
            ring_places=(behind % config.ring_tokens).flatten().to(device),
            mask=torch.nn.functional.pad(mask, (0, places)).to(device),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where the rows are, and what all their places may look at."""

    places: int
    turn: Turn
    """Of [rows * places] positions."""
    slots: Tensor
    ring_places: Tensor
    """[rows * window] int64 each: of the keys before the rows."""
    mask: Tensor
    """[rows, window + places] fp32: 0 where a key is seen, else -inf; a row's own places all see each other."""


class _DraftLayer:
    """One layer of the drafter: like a main layer, but its tokens see the places after them too."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics, *, keys: WindowKeys, ring: Ring) -> None:
        attn = source.within("attn")
        self._numerics, self._ring, self._keys = numerics, ring, keys
        self._scale = config.head_dim**-0.5
        self._attention_mixing = Mixing(config, source, numerics, sublayer="attn")
        self._queries = Queries(config, attn, numerics)
        self._output = Output(config, attn, numerics)
        self._sinks = attn.tensor("attn_sink")
        self._ffn_mixing = Mixing(config, source, numerics, sublayer="ffn")
        self._moe = load_moe(config.drafter.moe, source.within("ffn"), numerics)

    def run(self, seen: _Seen, streams: Tensor, pre: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Streams [rows * places, 4, hidden] and pre [rows * places, 4], in and out."""
        made = self._attention_mixing.coefficients(streams)
        output = self._attend(seen, self._numerics.fp8(self._attention_mixing.enter(streams, pre)))
        streams, pre = self._attention_mixing.leave(streams, output, made), made.pre
        made = self._ffn_mixing.coefficients(streams)
        output = self._moe(self._ffn_mixing.enter(streams, pre), None, scratch)
        return self._ffn_mixing.leave(streams, output, made), made.pre

    def _attend(self, seen: _Seen, x: Tensor) -> Tensor:
        """x: [rows * places, hidden] fp32 (fp8).  Draft keys are read as their records would have them, not stored."""
        ring, places = self._ring, seen.places
        queries = self._queries.run(self._queries.latent(x), seen.turn)
        own = ring.decode(ring.encode(self._keys.run(x, seen.turn)))
        own = own.view(-1, places, own.shape[1])
        before = ring.decode(ring.read(seen.slots, seen.ring_places)).view(len(own), -1, own.shape[2])
        keys = torch.cat([before, own], dim=1)
        parts = []
        for low in range(0, len(keys), TOKENS):  # whole products of TOKENS tokens, and few keys copied at a time
            mine = slice(low, low + TOKENS)
            each = queries[low * places : (low + TOKENS) * places]
            lists, masks = (part[mine].repeat_interleave(places, dim=0) for part in (keys, seen.mask))
            parts.append(attend(each, lists, masks, self._sinks, scale=self._scale))
        return self._output.run(torch.cat(parts), seen.turn)


def _sampled(logits: Tensor, draws: Sequence[Draw]) -> dict[int, int]:
    """Row -> token, without the rows whose logits are unusable: those sequences go on undrafted."""
    rows = list(range(len(draws)))
    try:
        choices = sample(logits, draws)
    except UnusableLogits as unusable:
        rows = [row for row in rows if row not in unusable.reasons]
        choices = sample(logits[rows], [draws[row] for row in rows])
    return {row: choice.token_id for row, choice in zip(rows, choices, strict=True)}
