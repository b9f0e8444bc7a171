"""How do tests make spans, and the messages that carry them?"""

from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.chassis import names
from services.local.console.spans import Span

NOON = 1_800_000_000.0
TRACE = "ab" * 16


def span(
    number: int, service: str, name: str, parent: int = 0, *, at: float = 0.0, takes: float = 1.0, **more: Any
) -> Span:
    """A span with id `number`. at, takes: seconds. more: trace_id, is_error, attributes."""
    return Span(
        trace_id=more.get("trace_id", TRACE),
        span_id=f"{number:016x}",
        parent_id=f"{parent:016x}" if parent else "",
        service=service,
        replica=f"{service}-0",
        name=name,
        started=NOON + at,
        ended=NOON + at + takes,
        is_error=more.get("is_error", False),
        attributes=more.get("attributes", {}),
    )


def edge(number: int = 1, request_id: str = "request-one", **more: Any) -> Span:
    """The recipe's span of an answered request."""
    attributes = {
        names.REQUEST_ID: request_id,
        names.GEN_AI_OPERATION_NAME: "chat",
        names.GEN_AI_REQUEST_MODEL: "m",
        names.GEN_AI_RESPONSE_ID: f"chatcmpl-{request_id}",
        names.HTTP_RESPONSE_STATUS_CODE: 200,
        names.GEN_AI_RESPONSE_FINISH_REASONS: ("stop",),
        names.GEN_AI_USAGE_INPUT_TOKENS: 300,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 256,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: 7,
        names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: 0.25,
    }
    return span(
        number, "recipe", "chat m", takes=2.0, **{**more, "attributes": attributes | more.get("attributes", {})}
    )


def whole_request() -> list[Span]:
    """One request's spans through seven services, in no order."""
    spans = [
        edge(),
        span(2, "entrypoint", "entrypoint.generate", 1, at=0.1, takes=1.8),
        span(3, "entrypoint", "kvstore.lookup", 2, at=0.1, takes=0.1, attributes={names.BLOCKS: 2}),
        span(4, "kvstore", "fathom.v1.Kvstore/Lookup", 3, at=0.15, takes=0.01),
        span(5, "prefill_lb", "fathom.v1.PrefillLb/Pick", 2, at=0.2, takes=0.01),
        span(6, "prefill", "prefill.run", 2, at=0.3, takes=0.5),
        span(7, "prefill", "prefill.chunk", 6, at=0.3, takes=0.2, attributes={names.CHUNK_TOKENS: 44}),
        span(8, "decode_lb", "fathom.v1.DecodeLb/Pick", 2, at=0.35, takes=0.01),
        span(9, "decode", "fathom.v1.Decode/Commit", 6, at=0.6, takes=0.01),
        span(10, "decode", "decode.run", 2, at=0.4, takes=1.4),
    ]
    return spans[::-1]


def message(*spans: dict[str, Any], service: str = "recipe") -> ExportTraceServiceRequest:
    """An OTLP message as a service sends it. spans: fields of the wire's Span; ids and times are filled in."""
    request = ExportTraceServiceRequest()
    batch = request.resource_spans.add()
    batch.resource.attributes.add(key="service.name").value.string_value = service
    scope = batch.scope_spans.add()
    for number, fields in enumerate(spans, 1):
        attributes = fields.pop("attributes", {})
        wire = scope.spans.add(
            **{
                "trace_id": b"\xab" * 16,
                "span_id": number.to_bytes(8, "big"),
                "name": "a span",
                "start_time_unix_nano": int(NOON * 1e9),
                "end_time_unix_nano": int(NOON * 1e9) + 1_000_000,
                **fields,
            }
        )
        for key, value in attributes.items():
            wire.attributes.add(key=key).value.string_value = value
    return request
