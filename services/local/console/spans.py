"""What of a span that arrived is kept? Nothing but known attributes, short and printable."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.chassis import names

Value = str | int | float | bool | tuple[str, ...]

SHOWN_ID = "fathom.shown_id"
"""The request id that the caller reads, where it is not ours."""
KEPT = frozenset({
    names.REQUEST_ID, SHOWN_ID, names.REPLICA, names.BLOCKS, names.IMAGES, names.BATCH_SEQUENCES, names.CHUNK_TOKENS,
    names.KV_TOKENS, names.MEMORY_TOKENS, names.HANDOFF_BACKEND, names.HANDOFF_BYTES, names.HTTP_ROUTE,
    names.HTTP_RESPONSE_STATUS_CODE, names.ERROR_TYPE, names.GEN_AI_OPERATION_NAME, names.GEN_AI_REQUEST_MODEL,
    names.GEN_AI_REQUEST_STREAM, names.GEN_AI_REQUEST_CHOICE_COUNT, names.GEN_AI_RESPONSE_ID,
    names.GEN_AI_RESPONSE_FINISH_REASONS, names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, names.GEN_AI_USAGE_INPUT_TOKENS,
    names.GEN_AI_USAGE_OUTPUT_TOKENS, names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS,
})  # fmt: skip
"""Whatever else a service may say of a request stays out: no prompt text and no token id can get in here."""
MAX_TEXT = 200
MAX_ITEMS = 16
MAX_SPANS_PER_MESSAGE = 8192
"""The services send at most 512 at a time."""
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_STATUS_ERROR = 2
# What one span costs in memory beside its texts: measured, and checked by a test.
_SPAN_BYTES, _ATTRIBUTE_BYTES = 1000, 130


class Malformed(Exception):  # noqa: N818 - reads as what happened
    """A message is no list of spans."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one service. Ids are lower-case hex; times are Unix seconds."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: the trace begins here."""
    service: str
    replica: str
    name: str
    started: float
    ended: float
    is_error: bool
    attributes: Mapping[str, Value]

    @property
    def num_bytes(self) -> int:
        """Memory it takes, rather too much than too little."""
        texts = [self.name, self.service, self.replica]
        for value in self.attributes.values():
            texts += value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
        return _SPAN_BYTES + _ATTRIBUTE_BYTES * len(self.attributes) + sum(map(sys.getsizeof, texts))


def read_spans(message: bytes) -> tuple[list[Span], int]:
    """Return the spans of an OTLP export request, and how many were dropped since they made no sense.

    Raises Malformed when the bytes are no such request.
    """
    try:
        request = ExportTraceServiceRequest.FromString(message)
    except DecodeError as error:
        raise Malformed(str(error)) from error
    kept: list[Span] = []
    num_dropped = 0
    for number, (service, replica, wire) in enumerate(_each(request)):
        span = _span(service, replica, wire) if number < MAX_SPANS_PER_MESSAGE else None
        if span is None:
            num_dropped += 1
        else:
            kept.append(span)
    return kept, num_dropped


def _each(request: Any) -> Iterator[tuple[str, str, Any]]:
    for batch in request.resource_spans:
        who = {item.key: item.value.string_value for item in batch.resource.attributes}
        service, replica = _text(who.get("service.name", "")), _text(who.get("service.instance.id", ""))
        for scope in batch.scope_spans:
            for wire in scope.spans:
                yield service, replica, wire


def _span(service: str, replica: str, wire: Any) -> Span | None:
    """Return the span, None when its ids or times cannot be."""
    trace_id, span_id, parent_id = wire.trace_id, wire.span_id, wire.parent_span_id
    has_ids = len(trace_id) == _TRACE_ID_BYTES and len(span_id) == _SPAN_ID_BYTES and any(trace_id) and any(span_id)
    has_parent = not parent_id or len(parent_id) == _SPAN_ID_BYTES
    started, ended = wire.start_time_unix_nano / 1e9, wire.end_time_unix_nano / 1e9
    if not (service and has_ids and has_parent and 0 < started <= ended):
        return None
    attributes = {
        sys.intern(item.key): value
        for item in wire.attributes
        if item.key in KEPT and (value := _value(item.value)) is not None
    }
    return Span(
        trace_id=trace_id.hex(),
        span_id=span_id.hex(),
        parent_id=parent_id.hex() if any(parent_id) else "",
        service=sys.intern(service),
        replica=sys.intern(replica),
        name=sys.intern(_text(wire.name)),
        started=started,
        ended=ended,
        is_error=wire.status.code == _STATUS_ERROR,
        attributes=attributes,
    )


def _value(wire: Any) -> Value | None:
    match wire.WhichOneof("value"):
        case "string_value":
            return _text(wire.string_value)
        case "bool_value":
            return bool(wire.bool_value)
        case "int_value":
            return int(wire.int_value)
        case "double_value":
            return float(wire.double_value) if math.isfinite(wire.double_value) else None
        case "array_value":
            return tuple(_text(item.string_value) for item in wire.array_value.values[:MAX_ITEMS])
    return None


def _text(text: str) -> str:
    """Keep a terminal safe: whoever names a span must not be able to move its cursor."""
    short = text[:MAX_TEXT]
    return short if short.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in short)
