"""How do the two vendors' protocols spell what every answer has: errors, request ids, and signs of life?"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final

import orjson
from starlette.types import Scope

from services.recipe.refusals import ApiError, bounded
from services.recipe.stream import PING


def frame(payload: dict[str, Any]) -> bytes:
    """Return an object as a server-sent event without a name."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_frame(payload: dict[str, Any]) -> bytes:
    """Return an object as a server-sent event that is named by its type."""
    return b"event: " + str(payload["type"]).encode() + b"\n" + frame(payload)


@dataclass(frozen=True, slots=True)
class OpenAiShape:
    """Errors as {"error": {message, type, param, code}}; comments while nothing is said."""

    ping: ClassVar[bytes] = PING
    id_header: ClassVar[bytes] = b"x-request-id"

    def status(self, error: ApiError) -> int:
        """Return the HTTP status to answer with."""
        return error.status

    def body(self, error: ApiError, _request_id: str) -> bytes:
        """Return the body of an answer that is an error."""
        return error.body()

    def last_frame(self, error: ApiError, _request_id: str) -> bytes:
        """Return what ends a stream that fails."""
        return frame(error.envelope())


@dataclass(frozen=True, slots=True)
class AnthropicShape:
    """Errors as {"type": "error", "error": {type, message}, "request_id"}; `ping` events while nothing is said."""

    ping: ClassVar[bytes] = named_frame({"type": "ping"})
    id_header: ClassVar[bytes] = b"request-id"

    def status(self, error: ApiError) -> int:
        """Return the HTTP status to answer with: their word for "come back later" is 529."""
        return HTTP_OVERLOADED if error.status == HTTPStatus.SERVICE_UNAVAILABLE else error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        """Return the body of an answer that is an error."""
        return orjson.dumps(self.envelope(error, request_id))

    def last_frame(self, error: ApiError, request_id: str) -> bytes:
        """Return what ends a stream that fails."""
        return named_frame(self.envelope(error, request_id))

    def envelope(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """Return the error object."""
        fallback = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(error.status, fallback)
        return {
            "type": "error",
            "error": {"type": kind, "message": bounded(error.message)},
            "request_id": request_id,
        }


HTTP_OVERLOADED = 529
_ANTHROPIC_TYPES: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}

Shape = OpenAiShape | AnthropicShape
OPENAI, ANTHROPIC = OpenAiShape(), AnthropicShape()


def shape_of(scope: Scope) -> Shape:
    """Return the shape that the caller of this HTTP request expects: by path, and by header where a path is shared."""
    path: str = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ANTHROPIC
    is_shared = path == "/v1/models" or path.startswith("/v1/models/")
    speaks = is_shared and any(name == b"anthropic-version" for name, _value in scope["headers"])
    return ANTHROPIC if speaks else OPENAI
