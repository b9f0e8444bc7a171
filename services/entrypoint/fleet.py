"""Which models can be served right now, and which of a model's fleets takes a request?

A fleet is all replicas of one model name and fingerprint: only they can hand KV to each other. It can serve when at
least one prefill and one decode replica of it are ready. Pure functions over registry snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from proto.common_pb2 import ModelCard
from services.chassis.errors import ModelNotFound, NoReplica
from services.chassis.registry import Replica

RETRY_SECONDS = 2.0
"""When to try again without a ready replica: a registry refresh is 1.5 s."""


def choose(model: str, prefill: Sequence[Replica], decode: Sequence[Replica]) -> ModelCard:
    """Return the card of the model's largest fleet; equal ones by fingerprint, so that all entrypoints agree.

    Raises NoReplica when the model is known but cannot be served now, or when nothing is known at all (the registry
    has not answered yet); ModelNotFound when other models are known and this one is not.
    """
    fleets = [card for card in _servable(prefill, decode) if card.name == model]
    if fleets:
        return fleets[0]
    known = {replica.model.name for replica in (*prefill, *decode) if replica.model}
    if known and model not in known:
        raise ModelNotFound(f"model {model!r} is not served here; there is {', '.join(sorted(known))}", field="model")
    raise NoReplica(f"model {model!r} has no ready replica", retry_after=RETRY_SECONDS)


def models(prefill: Sequence[Replica], decode: Sequence[Replica]) -> tuple[ModelCard, ...]:
    """Return one card per servable model, by name: the one that `choose` would give."""
    best: dict[str, ModelCard] = {}
    for card in _servable(prefill, decode):
        best.setdefault(card.name, card)
    return tuple(best[name] for name in sorted(best))


def _servable(prefill: Iterable[Replica], decode: Iterable[Replica]) -> Iterator[ModelCard]:
    """Cards of the fleets that can serve, largest first."""
    cards: dict[tuple[str, bytes], ModelCard] = {}
    counts: dict[tuple[str, bytes], list[int]] = {}
    for role, replicas in enumerate((prefill, decode)):
        for replica in replicas:
            if (card := replica.model) is None or not replica.is_ready:
                continue
            fleet = card.name, card.fingerprint
            counts.setdefault(fleet, [0, 0])[role] += 1
            # The shortest context of the fleet is what every one of its replicas can take.
            if fleet not in cards or card.context_tokens < cards[fleet].context_tokens:
                cards[fleet] = card
    able = [fleet for fleet, count in counts.items() if all(count)]
    for fleet in sorted(able, key=lambda f: (-sum(counts[f]), f[1], f[0])):
        yield cards[fleet]
