"""Which requests do spans tell of, and which way did each go?"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from services.chassis import names
from services.local.console.journey import Journey, Row
from services.local.console.spans import SHOWN_ID, Span, Value
from services.local.console.traces import EDGE
from services.local.sizes import in_words

LAST = "last"
SHORTEST_PREFIX = 6
"""Letters of an id that are enough, if no other request's begins alike."""
WHOLE_WAY = "entrypoint.generate"
"""The span that holds all others below the recipe's own."""
CLOSING_SECONDS = 5.0
"""The recipe's span comes a moment after the entrypoint's; later than this it will not come."""
SILENCE_SECONDS = 600.0
"""A long answer sends no span while it is generated; no request lives longer without a deadline of its own."""
_PACKAGE = "fathom.v1."


def newest(traces: Iterable[Sequence[Span]], limit: int, *, now: float) -> list[Journey]:
    """Return the newest requests by when they began, newest first. now: Unix seconds."""
    every = [journey for spans in traces for journey in _journeys(spans, now)]
    return sorted(every, key=lambda journey: journey.started_unix_seconds, reverse=True)[:limit]


def find(traces: Iterable[Sequence[Span]], wanted: str, *, now: float) -> Journey | None:
    """Return the request that `wanted` names: an id, the begin of one, or "last"; None if there is none, or several."""
    every = newest(traces, limit=1 << 30, now=now)
    if wanted == LAST:
        return next(iter(every), None)
    for journey in every:  # callers may use one id twice: the newest is meant
        if wanted in {journey.id, *journey.also}:
            return journey
    alike = [each for each in every if len(wanted) >= SHORTEST_PREFIX and each.id.startswith(wanted)]
    return alike[0] if len(alike) == 1 else None


def _journeys(spans: Sequence[Span], now: float) -> Iterator[Journey]:
    """Yield the requests of one trace; a caller may have put several into it."""
    children: dict[str, list[Span]] = {}
    present = {span.span_id for span in spans}
    for span in sorted(spans, key=lambda span: span.started):
        children.setdefault(span.parent_id, []).append(span)
    edges = [span for span in spans if span.service == EDGE and names.REQUEST_ID in span.attributes]
    at_edge = {span.span_id for span in edges}
    lost = [span for span in spans if span.parent_id not in present and span.span_id not in at_edge]
    own: set[str] = set()
    if len(edges) == 1:
        # A span whose parent has not come (a service was killed, say) is still this request's, if nobody else's.
        own = {span.span_id for span in lost if edges[0].started <= span.started <= edges[0].ended}
    adopted = [span for span in lost if span.span_id in own]
    lost = [span for span in lost if span.span_id not in own]
    for edge in edges:
        yield _journey([edge, *adopted], children, edge, now)
    if lost:
        yield _journey(sorted(lost, key=lambda span: span.started), children, None, now)


def _journey(tops: Sequence[Span], children: dict[str, list[Span]], edge: Span | None, now: float) -> Journey:
    placed = list(_walk(tops, children))
    began = min(span.started for _, span, _ in placed)
    heard = max(span.ended for _, span, _ in placed)
    has_run = edge is None and all(span.name == WHOLE_WAY for span in tops)
    is_running = edge is None and now - heard < (CLOSING_SECONDS if has_run else SILENCE_SECONDS)
    said: dict[str, Value] = {}
    for _, span, _ in reversed(placed):  # the outermost has the last word
        said.update(span.attributes)
    known = dict(edge.attributes) if edge is not None else said
    trace_id, request_id = tops[0].trace_id, _text(known.get(names.REQUEST_ID))
    shown = _text(known.get(SHOWN_ID)) or request_id or trace_id
    others = (request_id, _text(known.get(names.GEN_AI_RESPONSE_ID)), trace_id)
    first = known.get(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK)
    reasons = known.get(names.GEN_AI_RESPONSE_FINISH_REASONS)
    return Journey(
        id=shown,
        also=tuple(dict.fromkeys(other for other in others if other and other != shown)),
        operation=_text(known.get(names.GEN_AI_OPERATION_NAME)),
        model=_text(known.get(names.GEN_AI_REQUEST_MODEL)),
        started_unix_seconds=began,
        is_finished=edge is not None,
        is_running=is_running,
        is_closing=is_running and has_run,
        status=_count(known.get(names.HTTP_RESPONSE_STATUS_CODE)),
        finish_reasons=reasons if isinstance(reasons, tuple) else (),
        prompt_tokens=_count(known.get(names.GEN_AI_USAGE_INPUT_TOKENS)),
        cached_tokens=_count(known.get(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS)),
        output_tokens=_count(known.get(names.GEN_AI_USAGE_OUTPUT_TOKENS)),
        ttft_seconds=first if isinstance(first, float) else None,
        total_seconds=(edge.ended if edge is not None else max(heard, now) if is_running else heard) - began,
        path=_path(placed),
        rows=tuple(
            Row(
                depth=depth,
                service=span.service,
                replica=span.replica,
                name=span.name.removeprefix(_PACKAGE),
                start_seconds=span.started - began,
                seconds=span.ended - span.started,
                is_error=span.is_error,
                notes=tuple(_notes(span)),
            )
            for depth, span, _ in placed
        ),
    )


def _walk(tops: Sequence[Span], children: dict[str, list[Span]]) -> Iterator[tuple[int, Span, str]]:
    """Yield (depth, span, the service of its parent) from the top down. Spans in a circle are on nobody's way."""
    waiting = [(0, span, "") for span in reversed(tops)]
    seen: set[str] = set()
    while waiting:
        depth, span, above = waiting.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        yield depth, span, above
        waiting.extend((depth + 1, child, span.service) for child in reversed(children.get(span.span_id, ())))


def _path(placed: Iterable[tuple[int, Span, str]]) -> tuple[tuple[str, str], ...]:
    calls = sorted((span.started, above, span.service) for _, span, above in placed if above not in {"", span.service})
    return tuple(dict.fromkeys((caller, called) for _, caller, called in calls))


_WORDS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    (names.HTTP_RESPONSE_STATUS_CODE, lambda status: f"HTTP {status}"),
    (names.ERROR_TYPE, str),
    (names.REPLICA, str),
    (names.GEN_AI_USAGE_INPUT_TOKENS, lambda count: f"{count} prompt tokens"),
    (names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, lambda count: f"{count} cached"),
    (names.BLOCKS, lambda count: f"{count} block{'s' if count != 1 else ''}"),
    (names.IMAGES, lambda count: f"{count} image{'s' if count != 1 else ''}"),
    (names.MEMORY_TOKENS, lambda count: f"{count} tokens from prefill's memory" if count else ""),
    (names.CHUNK_TOKENS, lambda count: f"{count} token{'s' if count != 1 else ''} computed"),
    (names.KV_TOKENS, lambda count: f"KV of {count} tokens"),
    (names.HANDOFF_BACKEND, lambda backend: f"by {backend}"),
    (names.HANDOFF_BYTES, in_words),
    (names.GEN_AI_USAGE_OUTPUT_TOKENS, lambda count: f"{count} out"),
    (names.GEN_AI_RESPONSE_FINISH_REASONS, lambda reasons: ", ".join(each for each in reasons if each != "none")),
)  # fmt: skip


def _notes(span: Span) -> Iterator[str]:
    """Yield the few attributes that matter, in words."""
    for name, words in _WORDS:
        if name in span.attributes:
            try:
                note = words(span.attributes[name])
            except (TypeError, ValueError):  # of another kind than ours: whoever sent it is none of our services
                continue
            if note and not (name == names.ERROR_TYPE and note == _status_text(span)):
                yield note


def _status_text(span: Span) -> str:
    """Return the HTTP status that stands beside the error, which repeats it."""
    return str(span.attributes.get(names.HTTP_RESPONSE_STATUS_CODE, ""))


def _text(value: Value | None) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Value | None) -> int:
    return value if isinstance(value, int) else 0
