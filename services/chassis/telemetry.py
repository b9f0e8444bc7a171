"""How does a process log and trace?

Logs are JSON lines on stdout with constant event names. Spans leave by OTLP when an endpoint is set; without one, no
SDK is loaded, spans cost next to nothing, and a caller's trace context still passes through unchanged.
"""

import asyncio
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.chassis import names
from services.chassis.plain_structlog import structlog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = [
    "Span",
    "SpanKind",
    "bind_request",
    "current_traceparent",
    "flush",
    "is_sampled",
    "log",
    "pass_on",
    "record_span",
    "report_failure",
    "request_id",
    "setup",
    "setup_logging",
    "shutdown",
    "span",
]

EXPORT_INTERVAL_MILLIS = 500  # a trace is looked at right after its request
FLUSH_SECONDS = 2.0
_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")
_NANOSECONDS = 1_000_000_000

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class _State:
    """The one provider of this process; spans are made by it or, without it, by nobody."""

    provider: "TracerProvider | None" = None
    tracer: trace.Tracer | None = None
    """The provider's; asking for it anew costs a third of a span."""


def setup(service: str, replica: str, endpoint: str) -> None:
    """Export this process's spans to `endpoint` (OTLP/gRPC, http:// or https://); empty exports none."""
    shutdown()
    if not endpoint:
        return
    # Loaded late: SDK and exporter cost about 20 MiB that a service without tracing need not have.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased

    from services.chassis.sampling import FewASecond

    resource = Resource({"service.name": service, "service.namespace": "fathom", "service.instance.id": replica})
    provider = TracerProvider(sampler=ParentBased(FewASecond()), resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=2)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_MILLIS))
    _State.provider, _State.tracer = provider, provider.get_tracer("fathom")


def flush() -> None:
    """Send the ended spans, for at most FLUSH_SECONDS; blocks, so call it off the event loop."""
    if _State.provider is not None:
        _State.provider.force_flush(int(FLUSH_SECONDS * 1000))


def shutdown() -> None:
    """Flush and make no more spans; blocks as `flush` does."""
    flush()
    provider, _State.provider, _State.tracer = _State.provider, None, None
    if provider is not None:
        provider.shutdown()


@contextmanager
def span(
    name: str, *, traceparent: str | None = None, kind: SpanKind = SpanKind.INTERNAL, **attributes: Any
) -> Iterator[Span]:
    """Time a piece of work; it becomes the current span inside.

    traceparent: the W3C trace context of the cause; None means the current span, "" starts a new trace.
    attributes: names with dots go in as `**{names.GEN_AI_REQUEST_MODEL: model}`. None values are left out.
    """
    parent = _parent_context(traceparent)
    made = _start(name, parent, kind, attributes, None)
    inside = trace.set_span_in_context(made, parent)
    token = otel_context.attach(inside)
    try:
        yield made
    except BaseException as exc:
        _mark_failed(made, exc)
        raise
    finally:
        made.end()
        # A generator closed from another task leaves in another context; there is nothing to restore there.
        if otel_context.get_current() is inside:
            otel_context.detach(token)


def pass_on(traceparent: str) -> None:
    """Carry a caller's trace context through the rest of this task, without a span of this process's own.

    Like bind_request, for tasks that serve one call: nothing takes it off again.
    """
    match = _TRACEPARENT.match(traceparent)
    if match is not None:
        otel_context.attach(trace.set_span_in_context(NonRecordingSpan(_context_of(match))))


def record_span(
    name: str,
    *,
    traceparent: str,
    start_unix_seconds: float,
    end_unix_seconds: float,
    kind: SpanKind = SpanKind.INTERNAL,
    **attributes: Any,
) -> None:
    """Report work that already happened, for engine threads that only know its times. Unix seconds."""
    made = _start(name, _parent_context(traceparent), kind, attributes, int(start_unix_seconds * _NANOSECONDS))
    made.end(int(end_unix_seconds * _NANOSECONDS))


def current_traceparent() -> str:
    """Return the W3C trace context of the current span, or "" outside a trace.

    An unsampled trace is passed on with its flag 00: dropping it would make the next service start a trace of its own.
    """
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def is_sampled(traceparent: str) -> bool:
    """Return whether spans below this trace context are exported by this process."""
    match = _TRACEPARENT.match(traceparent)
    return _State.provider is not None and bool(match and int(match[3], 16) & TraceFlags.SAMPLED)


def bind_request(request_id: str) -> None:
    """Put the request id on every log line of this task from here on."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def request_id() -> str:
    """Return the request id bound to this task, or ""."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def report_failure(task: "asyncio.Task[Any]") -> None:
    """Log what a background task raised; for `add_done_callback`, where asyncio itself would tell only at exit."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("task.failed", task=task.get_name(), exc_info=exc)


def setup_logging(service: str, replica: str, level: str) -> None:
    """Write JSON lines to stdout, from structlog and from the standard library alike."""
    number = logging.getLevelNamesMapping()[level.upper()]

    def stamp(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"service": service, "replica": replica, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        stamp,
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
            foreign_pre_chain=[_name_foreign, *shared],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    # grpc logs every failed call although the error is raised as well; nats logs each reconnect attempt.
    for noisy in ("grpc", "grpc._cython.cygrpc", "nats"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_not_poller_noise)


def _start(
    name: str, parent: otel_context.Context, kind: SpanKind, attributes: Mapping[str, Any], start: int | None
) -> Span:
    tracer = _State.tracer
    if tracer is None:
        return NonRecordingSpan(trace.get_current_span(parent).get_span_context())
    present = {key: value for key, value in attributes.items() if value is not None}
    return tracer.start_span(name, parent, kind, present, start_time=start)


def _parent_context(traceparent: str | None) -> otel_context.Context:
    current = otel_context.get_current()
    if traceparent is None:
        return current
    return trace.set_span_in_context(NonRecordingSpan(_parse(traceparent)), current)


def _parse(traceparent: str) -> SpanContext:
    match = _TRACEPARENT.match(traceparent)
    return trace.INVALID_SPAN_CONTEXT if match is None else _context_of(match)


def _context_of(match: re.Match[str]) -> SpanContext:
    return SpanContext(
        int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=TraceFlags(int(match[3], 16) & 1)
    )


def _mark_failed(made: Span, exc: BaseException) -> None:
    if made.is_recording():
        made.set_attribute(names.ERROR_TYPE, type(exc).__name__)
        made.set_status(Status(StatusCode.ERROR))


def _name_foreign(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Keep event names constant: a library's sentence becomes a field."""
    record = event.get("_record")
    return {**event, "event": "library.log", "logger": getattr(record, "name", ""), "text": event.get("event")}


def _is_not_poller_noise(record: logging.LogRecord) -> bool:
    """Drop grpc.aio's harmless BlockingIOError: two loops woke for the one completion queue and one found it empty."""
    return not (record.exc_info and isinstance(record.exc_info[1], BlockingIOError))
