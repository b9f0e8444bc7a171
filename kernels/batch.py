"""The nouns of one step: which tokens of which sequences are computed, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn a row's logits into a token. Whoever admits a request validates the ranges; engines trust them."""

    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""
    top_p: float = 1.0
    """Keeps the smallest set of tokens whose probability reaches this share; 1 keeps all."""
    top_k: int = 0
    """Keeps this many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drops tokens less likely than this share of the likeliest one; 0 drops none."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or answer; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, logit units): added before anything else."""
    seed: int = 0
    """Of the counter-based noise; unsigned 64 bit."""
    num_logprobs: int | None = None
    """Asks for the chosen token's logprob and this many alternatives; None asks for neither."""


PENDING = -1
"""Stands for the one token of a row that the step launched before will sample for its sequence: it is not known yet.

Where that step verifies drafts, the row is planned as if all of them were accepted: its position is the highest it can
have, and the device moves it back by what was not. Tokens before it that depend on that are PENDING as well.
"""


@dataclass(frozen=True, slots=True)
class Image:
    """Embeddings that stand in a prompt instead of tokens. Keys of blocks they touch carry the image's hash."""

    position: int
    """Absolute position of the first."""
    num_tokens: int
    embeddings: bytes | memoryview
    """[num_tokens, hidden_size] row-major fp32."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a row must not look at, and must not write, since its past was found and not computed here."""

    window_from: int = 0
    """Sliding windows hold nothing below this position."""
    write_from: int = 0
    """KV in blocks below this position is shared: tokens computed a second time do not write it."""
    keep_from: int = 0
    """Windows of the decoder layers show nothing below this position; 0 shows all (decoder replay is off)."""
    compact: bool = False
    """Tokens below keep_from skip the decoder layers."""


NO_REPLAY = Replay()


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: a chunk of its prompt, or its newest token."""

    sequence: int
    """Names the sequence in the result."""
    token_ids: Sequence[int]
    """The tokens to compute, at least one."""
    position: int
    """Absolute position of token_ids[0]; KV for [0, position) is already in the table's blocks."""
    block_table: Sequence[int]
    """Pool block ids, in order, covering at least position + len(token_ids) tokens."""
    sampling: SamplingParams | None = None
    """None: no token is wanted (this is not the prompt's last chunk)."""
    history: Sequence[int] = ()
    """All tokens so far including token_ids; needed only with penalties."""
    num_prompt_tokens: int = 0
    """Leading part of history that is prompt: presence and frequency penalties count only the answer."""
    allowed_mask: bytes | None = None
    """Little-endian bitmask over the vocabulary, bit 0 of byte 0 is token 0; None allows all."""
    window: int = 0
    """Window slot that holds the state at `position`; 0 for models without windows."""
    preceding: Sequence[int] = ()
    """The last tokens before token_ids[0], as many as the model asks for (fewer at the start)."""
    images: tuple[Image, ...] = ()
    """Those that overlap token_ids; their positions' token ids only name them."""
    replay: Replay = NO_REPLAY
    targets: Sequence[int] = ()
    """Tokens whose logprobs are wanted: targets[i] follows token_ids[i]. As many as token_ids, or fewer."""
    num_target_logprobs: int = 0
    """Alternatives to each target."""
    num_drafts: int = 0
    """How many of token_ids, the last ones, are guesses: a token is drawn after each, and before the first of them. A
    draft that is the token drawn in its place is accepted, and so on until one is not."""
    wants_drafts: bool = False
    """Guess what may follow the token that is drawn, where the model can: the next step's row may verify it."""

    def wanted(self, *, every_row: bool = False) -> list[int]:
        """Which of token_ids need logits, ascending.  every_row: the last one does, sampled or not."""
        last = len(self.token_ids) - 1
        if self.num_drafts:
            return list(range(last - self.num_drafts, last + 1))
        needs_last = (every_row or self.sampling is not None) and last >= len(self.targets)
        return [*range(len(self.targets)), *([last] if needs_last else [])]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows computed in one step. No padding: their tokens are laid end to end."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """How likely the model held a token that it was given, at temperature 1 and by the model alone."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's new token."""

    sequence: int
    token_id: int
    logprob: float | None = None
    """Natural log of the chosen token's probability; None unless num_logprobs was set."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""
    accepted: tuple[int, ...] = ()
    """Drafts that were right, in order: they come before token_id."""
    drafts: tuple[int, ...] = ()
    """What may follow token_id, nearest first."""
    confidences: tuple[float, ...] = ()
    """Of each of them: chance that it is right if those before it are."""
    problem: str | None = None
    """Why the row has no token (NaN logits, or nothing is allowed); token_id is then -1. Batch mates are fine."""
