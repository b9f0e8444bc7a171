"""Which token follows, given a row of logits?

The winner is argmax over the surviving tokens of logit / temperature + noise(seed, position, token); see gumbel.py for
the noise. In order: logit bias, repetition then presence and frequency penalties, the allowed-token mask; temperature;
top-k, top-p (of what top-k left), min-p. Temperature 0 is greedy. Ties go to the lower id, in every stage.

Every row is decided from that row alone, on the host, in fp64 and by one thread: what else is in the batch, the thread
count and the device of the logits cannot change a token. A whole vocabulary is never sorted. (numpy, not torch: short
torch calls wake OpenMP or MKL workers, and on busy cores a wake-up costs more than the row.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops.gumbel import Scores, TokenIds, noise_key, winner

GREEDY_BELOW = 1e-9
"""Temperatures below it are greedy: noise of at most 20 would move logits by less than fp32 resolves."""

_SORTED_TOKENS = 512
"""Sorting this many costs less than another pass over them."""


class Params(Protocol):
    """What the caller asked for; the fields of kernels.batch.SamplingParams, whose ranges were checked at admission."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_logprobs(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of logits is to be turned into a token with."""

    params: Params
    position: int
    """Absolute position of the token to come: how many tokens precede it."""
    history: Sequence[int] = ()
    """All tokens before it; read only when a penalty is set."""
    num_prompt_tokens: int = 0
    """Leading part of history that is prompt."""
    allowed_mask: bytes | None = None
    """Bitmask over the vocabulary, bit 0 of byte 0 is token 0; None allows all."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The token, and its logprobs if asked for.

    logprob: natural log of its probability at temperature 1, after bias, penalties and mask, before any truncation.
    top: (token id, logprob), likeliest first, ties by id; impossible tokens are left out.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class UnusableLogits(Exception):  # noqa: N818 - named by meaning, like the service errors
    """Some rows have no token to give. `reasons` names them by row index; the other rows are fine on their own."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(f"row {row}: {reason}" for row, reason in self.reasons.items()))


class _NoToken(Exception):  # noqa: N818 - becomes a reason of UnusableLogits
    pass


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Choice]:
    """One choice for each row.

    logits: [rows, vocab] floating, any device, not changed.  Raises UnusableLogits naming every row whose logits hold
    NaN or +inf, or that may take no token.
    """
    if logits.ndim != 2 or logits.shape[0] != len(draws):
        raise ValueError(f"logits are {list(logits.shape)}, not [{len(draws)}, vocab]")
    if not draws:
        return []
    largest, likeliest = (column.tolist() for column in logits.max(dim=-1))  # NaN wins a max; the first of equals too
    plain = [_is_plain_greedy(draw) for draw in draws]
    host = _on_host(logits, [row for row, is_plain in enumerate(plain) if not is_plain])
    choices: list[Choice] = []
    reasons: dict[int, str] = {}
    for row, draw in enumerate(draws):
        try:
            _check_largest(largest[row])
            choices.append(Choice(likeliest[row]) if plain[row] else _sample_row(host[row].astype(np.float64), draw))
        except _NoToken as reason:
            reasons[row] = str(reason)
    if reasons:
        raise UnusableLogits(reasons)
    return choices


def score(logits: Tensor, token_ids: Sequence[int], *, num_top: int) -> list[Choice]:
    """The logprob of each row's given token, and of the num_top likeliest: by the model alone, at temperature 1.

    logits: [rows, vocab] floating, any device.  Raises UnusableLogits naming every row with NaN or +inf.
    """
    largest = logits.max(dim=-1).values.tolist() if len(token_ids) else []
    reasons = {row: f"the largest logit is {logit}" for row, logit in enumerate(largest) if not math.isfinite(logit)}
    if reasons:
        raise UnusableLogits(reasons)
    host = _on_host(logits, list(range(len(token_ids))))
    return [_with_logprobs(host[row].astype(np.float64), token, num_top) for row, token in enumerate(token_ids)]


def _on_host(logits: Tensor, rows: list[int]) -> dict[int, np.ndarray]:
    """The rows asked for, as arrays that hold the same values."""
    if not rows:
        return {}
    wanted = logits.detach() if len(rows) == len(logits) else logits.detach()[rows]
    exact = wanted if wanted.dtype in {torch.float32, torch.float64} else wanted.float()
    return dict(zip(rows, exact.cpu().numpy(), strict=True))


def _is_plain_greedy(draw: Draw) -> bool:
    return draw.params.temperature < GREEDY_BELOW and draw.params.num_logprobs is None and not _changes_logits(draw)


def _changes_logits(draw: Draw) -> bool:
    params = draw.params
    return bool(params.logit_bias or _penalises(params) or draw.allowed_mask is not None)


def _penalises(params: Params) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _check_largest(logit: float) -> None:
    if not math.isfinite(logit):
        raise _NoToken(f"the largest logit is {logit}")


def _sample_row(row: Scores, draw: Draw) -> Choice:
    """row: [vocab] logits, ours to change, the largest finite."""
    if _changes_logits(draw):
        _adjust(row, draw)
    params = draw.params
    if params.temperature < GREEDY_BELOW:
        token = int(row.argmax())
    else:
        scores, token_ids = _truncated(row / params.temperature, params)
        token = winner(scores, token_ids, noise_key(params.seed, draw.position))
    if params.num_logprobs is None:
        return Choice(token)
    return _with_logprobs(row, token, params.num_logprobs)


def _adjust(row: Scores, draw: Draw) -> None:
    """Apply bias, penalties and mask in place."""
    params = draw.params
    for token, value in params.logit_bias:
        if not 0 <= token < row.size:
            raise _NoToken(f"logit bias names token {token}, the vocabulary has {row.size}")
        row[token] += value
    if params.repetition_penalty != 1.0:
        seen, _ = _counted(draw.history, row.size)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        answered, times = _counted(draw.history[draw.num_prompt_tokens :], row.size)
        row[answered] -= params.frequency_penalty * times + params.presence_penalty
    if draw.allowed_mask is not None:
        row[~_unpacked(draw.allowed_mask, row.size)] = -math.inf
    if not math.isfinite(largest := float(row.max())):
        raise _NoToken(f"after bias, penalties and mask no token is left (the largest logit is {largest})")


def _counted(tokens: Sequence[int], vocabulary: int) -> tuple[TokenIds, TokenIds]:
    """Each different token and how often it occurs; placeholders of images lie outside the vocabulary: no logit."""
    ids, times = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
    known = (ids >= 0) & (ids < vocabulary)
    return ids[known], times[known]


def _unpacked(mask: bytes, vocabulary: int) -> NDArray[np.bool_]:
    if len(mask) * 8 < vocabulary:
        raise _NoToken(f"the mask of allowed tokens covers {len(mask) * 8} of {vocabulary} tokens")
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little").view(np.bool_)


def _truncated(scores: Scores, params: Params) -> tuple[Scores, TokenIds]:
    """The scores that survive top-k, top-p and min-p, and their token ids, ascending."""
    token_ids = np.arange(scores.size)
    if 0 < params.top_k < scores.size:
        token_ids = _largest(scores, params.top_k)
        scores = scores[token_ids]
    if params.top_p < 1.0:
        kept = _nucleus(scores, params.top_p)
        scores, token_ids = scores[kept], token_ids[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(scores >= scores.max() + math.log(params.min_p))
        scores, token_ids = scores[kept], token_ids[kept]
    return scores, token_ids


def _largest(values: Scores, count: int) -> TokenIds:
    """Indices, ascending, of the `count` largest values; of those that tie for last place, the lowest."""
    if count >= values.size:
        return np.arange(values.size)
    least = np.partition(values, values.size - count)[values.size - count]
    kept = values > least
    kept[np.flatnonzero(values == least)[: count - int(kept.sum())]] = True
    return np.flatnonzero(kept)


def _nucleus(scores: Scores, top_p: float) -> TokenIds:
    """Indices, ascending, of the smallest leading set whose softmax mass reaches top_p; at least one."""
    peak = float(scores.max())
    # fp32, whose exp is vectorised on every CPU: a sum that is off by 1e-7 moves no cut that matters.
    rough = np.exp((scores - peak).astype(np.float32))
    total = float(rough.sum(dtype=np.float64))
    # All tokens lighter than this weigh less together than what may be left out, so none of them is in the set.
    heavy = np.flatnonzero(rough >= (1.0 - top_p) * total / scores.size)
    return heavy[_leading(scores[heavy], rough[heavy].astype(np.float64), top_p * total)]


def _leading(scores: Scores, weights: Scores, needed: float) -> TokenIds:
    """Indices, ascending, of the smallest set of highest scores whose weights reach `needed`; at least one."""
    peak = float(scores.max())
    low, high, above = -math.inf, math.inf, 0.0
    band = np.arange(scores.size)
    # By halves of the score range, until so few are left that sorting them is cheap.
    while band.size > _SORTED_TOKENS:
        floor = max(low, float(scores[band].min()))
        middle = floor + (min(high, peak) - floor) / 2
        if not floor < middle < high:
            break
        is_upper = scores[band] >= middle
        upper = band[is_upper]
        mass = float(weights[upper].sum())
        if above + mass >= needed:
            low, band = middle, upper
        else:
            high, band, above = middle, band[~is_upper], above + mass
    ranked = band[np.argsort(-scores[band], kind="stable")]
    reached = np.flatnonzero(above + np.cumsum(weights[ranked]) >= needed)
    kept = scores >= high
    kept[ranked[: int(reached[0]) + 1] if reached.size else ranked] = True
    return np.flatnonzero(kept)


def _with_logprobs(row: Scores, token: int, count: int) -> Choice:
    peak = float(row.max())
    total = peak + math.log(float(np.exp(row - peak).sum()))
    leading = _largest(row, count) if count else np.arange(0)
    ranked = leading[np.argsort(-row[leading], kind="stable")]
    top = zip(ranked.tolist(), (row[ranked] - total).tolist(), strict=True)
    likely = tuple((other, logprob) for other, logprob in top if logprob > -math.inf)
    return Choice(token, float(row[token]) - total, likely)
