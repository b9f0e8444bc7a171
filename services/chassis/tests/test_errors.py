"""Does an error keep its meaning on its way, and a defect its text at home?"""

import asyncio

import pytest
from structlog.testing import capture_logs

from proto.common_pb2 import StreamError
from services.chassis import errors
from services.chassis.errors import FathomError, InternalError, Overloaded, from_stream_error, to_stream_error

TABLE = {  # the house's table: class -> (gRPC, HTTP)
    "InvalidRequest": ("INVALID_ARGUMENT", 400),
    "PromptTooLong": ("INVALID_ARGUMENT", 400),
    "BadSampling": ("INVALID_ARGUMENT", 400),
    "BadSchema": ("INVALID_ARGUMENT", 400),
    "BadImage": ("INVALID_ARGUMENT", 400),
    "Unauthenticated": ("UNAUTHENTICATED", 401),
    "Forbidden": ("PERMISSION_DENIED", 403),
    "ModelNotFound": ("NOT_FOUND", 404),
    "Overloaded": ("RESOURCE_EXHAUSTED", 429),
    "NoReplica": ("UNAVAILABLE", 503),
    "PeerLost": ("UNAVAILABLE", 503),
    "BlocksLost": ("FAILED_PRECONDITION", 500),
    "DeadlinePassed": ("DEADLINE_EXCEEDED", 504),
    "Cancelled": ("CANCELLED", 499),
    "InternalError": ("INTERNAL", 500),
}


def test_the_table_is_the_houses() -> None:
    assert TABLE == {name: (kind.code.name, kind.http_status) for name, kind in errors.KINDS.items()}


@pytest.mark.parametrize("kind", [k for k in errors.KINDS.values() if k is not InternalError])
def test_every_kind_survives_a_shared_stream(kind: type[FathomError]) -> None:
    """Class, message, field and retry_after arrive as they left."""
    sent = kind("what was wrong", field="messages[0]", retry_after=2.5)

    came = from_stream_error(StreamError.FromString(to_stream_error(sent).SerializeToString()))

    assert (kind, "what was wrong", "messages[0]", 2.5) == (type(came), came.message, came.field, came.retry_after)


def test_a_stranger_becomes_an_id_and_its_text_stays_in_the_log() -> None:
    with capture_logs() as logs:
        message = to_stream_error(ValueError("the secret prompt"))

    assert "InternalError" == message.kind
    assert "secret" not in str(message)
    assert logs[0]["error_id"] in message.message
    assert isinstance(logs[0]["exc_info"], ValueError)


def test_a_defect_keeps_one_id_over_all_hops_and_is_logged_once() -> None:
    """Who reads the client's error finds the traceback with it."""
    with capture_logs() as logs:
        first = to_stream_error(InternalError("pool is corrupt"))
        second = to_stream_error(from_stream_error(first))

    assert first == second
    assert 1 == len(logs)
    assert "pool is corrupt" == logs[0]["detail"]
    assert "corrupt" not in first.message


def test_a_class_from_a_newer_peer_is_understood_by_its_code() -> None:
    came = from_stream_error(StreamError(code=8, kind="TenantOverQuota", message="slow down", retry_after_seconds=3))

    assert (Overloaded, 3) == (type(came), came.retry_after)


def test_our_own_cancellation_is_told_as_cancelled() -> None:
    assert "Cancelled" == to_stream_error(asyncio.CancelledError()).kind
