"""What can go wrong, and how does each kind look on the wire and over HTTP?"""

import asyncio
import secrets
from typing import ClassVar

import grpc
import structlog

from proto.common_pb2 import StreamError

ERROR_METADATA = "fathom-error-bin"
HTTP_CLIENT_CLOSED = 499

_log = structlog.get_logger()


class FathomError(Exception):
    """Any error with a meaning of its own.

    `message` is safe to show to the caller; `field` is the request field at fault in the public API's spelling, or "";
    `retry_after` is in seconds, 0 when retrying makes no sense.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, message: str = "", *, field: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """Name of the class, as it travels."""
        return type(self).__name__


class InvalidRequest(FathomError):  # noqa: N818 - named by meaning
    """The caller asked for something that can never work."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class PromptTooLong(InvalidRequest):
    """Prompt plus answer exceed the model's context."""


class BadSampling(InvalidRequest):
    """A sampling parameter is out of its range."""


class BadSchema(InvalidRequest):
    """A grammar or JSON schema cannot be obeyed."""


class BadImage(InvalidRequest):
    """An image cannot be read, or the model takes none."""


class Unauthenticated(FathomError):  # noqa: N818 - named by meaning
    """Nobody knows the caller."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class Forbidden(FathomError):  # noqa: N818 - named by meaning
    """The caller is known and may not."""

    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class ModelNotFound(FathomError):  # noqa: N818 - named by meaning
    """No replica serves this model."""

    code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class Overloaded(FathomError):  # noqa: N818 - named by meaning
    """No room now; `retry_after` says when to try again."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429

    def __init__(self, message: str = "", *, field: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, field=field, retry_after=retry_after)


class NoReplica(FathomError):  # noqa: N818 - named by meaning
    """No ready replica can take the work."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503

    def __init__(self, message: str = "", *, field: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, field=field, retry_after=retry_after)


class PeerLost(NoReplica):
    """The replica that had the work is gone, or cannot be reached."""


class BlocksLost(FathomError):  # noqa: N818 - named by meaning
    """KV blocks that were promised are not there: recompute."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500


class DeadlinePassed(FathomError):  # noqa: N818 - named by meaning
    """Nobody waits for the answer any more."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(FathomError):  # noqa: N818 - named by meaning
    """The caller took the request back."""

    code = grpc.StatusCode.CANCELLED
    http_status = HTTP_CLIENT_CLOSED


class InternalError(FathomError):
    """A defect. Callers see only `error_id`; `detail` and the traceback stay in the log of the process that raised."""

    def __init__(self, detail: str = "", *, error_id: str = "") -> None:
        self.error_id = error_id or secrets.token_hex(8)
        self.detail = detail
        self.is_reported = bool(error_id)
        super().__init__(f"internal error {self.error_id}")


KINDS: dict[str, type[FathomError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequest,
        PromptTooLong,
        BadSampling,
        BadSchema,
        BadImage,
        Unauthenticated,
        Forbidden,
        ModelNotFound,
        Overloaded,
        NoReplica,
        PeerLost,
        BlocksLost,
        DeadlinePassed,
        Cancelled,
        InternalError,
    )
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# What a status means when no Fathom service attached its own error. RESOURCE_EXHAUSTED is missing on purpose: gRPC
# itself says it for an oversized message, which is a defect and not a reason to retry.
_BARE: dict[grpc.StatusCode, type[FathomError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.FAILED_PRECONDITION: BlocksLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def as_fathom_error(exc: BaseException) -> FathomError:
    """Return `exc` if it is one of ours; report a stranger in the log, with traceback, and return its InternalError."""
    if isinstance(exc, InternalError):
        if not exc.is_reported:
            exc.is_reported = True
            _log.error("error.internal", error_id=exc.error_id, detail=exc.detail, exc_info=exc)
        return exc
    if isinstance(exc, FathomError):
        return exc
    if isinstance(exc, asyncio.CancelledError):
        return Cancelled("cancelled")
    if isinstance(exc, grpc.aio.AioRpcError):
        return from_rpc(exc)
    stranger = InternalError(repr(exc))
    stranger.is_reported = True
    _log.error("error.unexpected", error_id=stranger.error_id, exc_info=exc)
    return stranger


def to_stream_error(exc: BaseException) -> StreamError:
    """Return the message for `exc`; strangers are reported and become an id without text."""
    error = as_fathom_error(exc)
    return StreamError(
        code=error.code.value[0],
        kind=error.kind,
        message=error.message,
        retry_after_seconds=error.retry_after,
        field=error.field,
    )


def from_stream_error(message: StreamError) -> FathomError:
    """Return the error that `to_stream_error` was given, with class, message, field and retry_after."""
    code = _CODES.get(message.code, grpc.StatusCode.UNKNOWN)
    # A class newer than this process is still understood by its code.
    kind = KINDS.get(message.kind) or _BARE.get(code)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        kind = kind or Overloaded
    if kind is None or kind is InternalError:
        words = message.message.split()
        return InternalError(message.message, error_id=words[-1] if words else "unknown")
    return kind(message.message, field=message.field, retry_after=message.retry_after_seconds)


_CALL_OVER = "Internal error from Core"
"""What grpc.aio says when a stream ended under a read or write: its way to say that the peer is gone, not a fault."""


def from_rpc(exc: grpc.aio.AioRpcError, *, peer: str = "") -> FathomError:
    """Return the error the peer raised, rebuilt from its trailing metadata, or the meaning of a bare status."""
    for key, value in exc.trailing_metadata() or ():
        if key == ERROR_METADATA and isinstance(value, bytes):
            return from_stream_error(StreamError.FromString(value))
    kind = _BARE.get(exc.code())
    if kind is PeerLost or exc.details() == _CALL_OVER:
        return PeerLost(f"{peer or 'the peer'} cannot be reached")
    if kind is None:
        error = InternalError(f"{peer}: {exc.code()} {exc.details()}")
        _log.error("rpc.status.unexpected", peer=peer, code=exc.code().name, details=exc.details(), id=error.error_id)
        error.is_reported = True
        return error
    return kind(exc.details() or "")
