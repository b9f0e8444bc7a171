"""Does one trace hold a request together, and does a log line say whose it is?"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import structlog

from proto.kvstore_pb2 import LookupRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis import names, telemetry, testing
from services.chassis.channel import open_channel
from services.chassis.testing import OtlpReceiver
from services.chassis.tests.echo import EchoKvstore

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    """A receiver that this process exports to."""
    async with OtlpReceiver() as receiver:
        telemetry.setup("kvstore", "kvstore-0", receiver.endpoint)
        yield receiver
        await asyncio.to_thread(telemetry.shutdown)


@pytest.fixture
def plain_logging() -> Iterator[None]:
    """Puts both logging systems back as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


async def test_a_trace_runs_through_a_call(receiver: OtlpReceiver) -> None:
    """Edge span, its child, and the server's span on the other side, with the right parents, attributes and times."""
    servicer = EchoKvstore()
    async with testing.serve(servicer.add) as address, open_channel(address) as channel:
        with telemetry.span(
            "chat m",
            traceparent=PARENT,
            kind=telemetry.SpanKind.SERVER,
            **{names.GEN_AI_REQUEST_MODEL: "m", "gone": None},
        ):
            with telemetry.span("lookup", kind=telemetry.SpanKind.CLIENT):
                await KvstoreStub(channel).Lookup(LookupRequest(), timeout=30)
            telemetry.record_span(
                "chunk",
                traceparent=telemetry.current_traceparent(),
                start_unix_seconds=time.time() - 1,
                end_unix_seconds=time.time(),
            )
    await asyncio.to_thread(telemetry.flush)
    spans = {span.name: span for span in await receiver.wait_for(lambda spans: len(spans) == 4)}
    edge, lookup, served, chunk = (spans[n] for n in ("chat m", "lookup", "fathom.v1.Kvstore/Lookup", "chunk"))

    assert {PARENT.split("-")[1]} == {span.trace_id for span in spans.values()}
    assert [PARENT.split("-")[2], edge.span_id, lookup.span_id, edge.span_id] == [
        span.parent_id for span in (edge, lookup, served, chunk)
    ]
    assert ("kvstore", "kvstore-0") == (served.service, served.replica)
    assert {names.GEN_AI_REQUEST_MODEL: "m"} == edge.attributes
    assert "fathom.v1.Kvstore/Lookup" == served.attributes[names.RPC_METHOD]
    assert 0.9 < chunk.end_seconds - chunk.start_seconds < 1.1


async def test_a_failed_span_says_what_failed(receiver: OtlpReceiver) -> None:
    with pytest.raises(ValueError, match="x"), telemetry.span("work"):
        raise ValueError("x")

    await asyncio.to_thread(telemetry.flush)
    (span,) = await receiver.wait_for(lambda spans: len(spans) == 1)
    assert (True, "ValueError", "") == (span.is_error, span.attributes[names.ERROR_TYPE], span.parent_id)


async def test_an_unsampled_trace_is_passed_on_and_not_exported(receiver: OtlpReceiver) -> None:
    """The caller's decision holds in every service behind us."""
    with telemetry.span("quiet", traceparent=PARENT[:-2] + "00"):
        passed = telemetry.current_traceparent()
    with telemetry.span("loud", traceparent=PARENT):
        pass
    await asyncio.to_thread(telemetry.flush)
    spans = await receiver.wait_for(bool)

    assert ["loud"] == [span.name for span in spans]
    assert passed.startswith(PARENT[:35])
    assert passed.endswith("-00")
    assert (True, False) == (telemetry.is_sampled(PARENT), telemetry.is_sampled(passed))


def test_without_an_endpoint_a_callers_trace_passes_through_unchanged() -> None:
    """No SDK, no spans, no trace of our own; but what came in goes out."""
    with telemetry.span("a", traceparent=PARENT), telemetry.span("b"):
        assert PARENT == telemetry.current_traceparent()
    with telemetry.span("c"):
        assert "" == telemetry.current_traceparent()
    with telemetry.span("d", traceparent="no such thing"):
        assert "" == telemetry.current_traceparent()
    assert not telemetry.is_sampled(PARENT)


async def test_a_generator_closed_elsewhere_keeps_contexts_apart(caplog: pytest.LogCaptureFixture) -> None:
    """A stream dropped in the middle of its span neither complains nor leaks the span into another task."""

    async def stream() -> AsyncIterator[int]:
        with telemetry.span("s", traceparent=PARENT):
            yield 1
            yield 2

    frames = stream()
    await asyncio.create_task(frames.__anext__())  # type: ignore[arg-type]  # an async generator's is a coroutine
    await asyncio.create_task(frames.aclose())  # type: ignore[attr-defined]  # as above
    assert "" == telemetry.current_traceparent()
    assert [] == [r for r in caplog.records if "detach" in r.message]


def test_logs_are_json_lines_with_the_request_id(capsys: pytest.CaptureFixture[str], plain_logging: None) -> None:
    """Ours and libraries' alike: constant event, level, time, service, replica, request."""
    telemetry.setup_logging("decode", "decode-1", "info")
    telemetry.bind_request("req-1")
    telemetry.log.info("decode.step.done", num_sequences=3)
    telemetry.log.debug("decode.too.quiet")
    logging.getLogger("some.library").warning("odd thing: %s", 7)
    logging.getLogger("grpc._cython.cygrpc").error("noise")
    try:
        raise ValueError("boom")
    except ValueError:
        telemetry.log.exception("decode.failed")

    ours, theirs, failed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert ("decode.step.done", 3, "info") == (ours["event"], ours["num_sequences"], ours["level"])
    assert ("library.log", "some.library", "odd thing: 7") == (theirs["event"], theirs["logger"], theirs["text"])
    assert "ValueError: boom" in failed["exception"]
    assert {("decode", "decode-1", "req-1")} == {
        (line["service"], line["replica"], line["request_id"]) for line in (ours, theirs, failed)
    }
