"""What does the caller read when we cannot answer? Every error body of the public API is made here."""

import math
from http import HTTPStatus
from typing import Any

import orjson

from services.chassis import errors

MAX_MESSAGE_CHARACTERS = 1000
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_CODES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_TIMEOUT: "request_timeout",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
    errors.HTTP_CLIENT_CLOSED: "cancelled",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable",
    HTTPStatus.GATEWAY_TIMEOUT: "deadline_passed",
}


class ModelFolderError(Exception):
    """The model folder cannot serve; the message says what is missing."""


class ApiError(Exception):
    """An answer that is an error: HTTP status, text, and the request field at fault ("" when none is)."""

    def __init__(
        self, status: int, message: str, *, param: str = "", code: str = "", retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> bytes:
        """Return the OpenAI error envelope, well below 8 KB whatever was asked."""
        return orjson.dumps(self.envelope())

    def envelope(self) -> dict[str, Any]:
        """Return the OpenAI error envelope as a dict: message, type, param and code are always there."""
        fallback = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {
            "error": {
                "message": bounded(self.message),
                "type": _TYPES.get(self.status, fallback),
                "param": bounded(self.param) or None,
                "code": self.code or _CODES.get(self.status),
            }
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that go with it."""
        if self.status == HTTPStatus.REQUEST_TIMEOUT:
            return [(b"connection", b"close")]  # the rest of the body may still come, and is no next request
        if not self.retry_after_seconds:
            return []
        return [(b"retry-after", str(max(1, math.ceil(self.retry_after_seconds))).encode())]


def refuse(param: str, rule: str, *, code: str = "", status: int = HTTPStatus.BAD_REQUEST) -> ApiError:
    """Return the error for one field; the message names it and says what would be right."""
    return ApiError(status, f"{param}: {rule}" if param else rule, param=param, code=code or "invalid_value")


def too_long(param: str, context_tokens: int, prompt: str, answer: str) -> ApiError:
    """Return the error for what exceeds the context; `prompt` and `answer` are the tokens of each, in words."""
    rule = f"this model's context is {context_tokens} tokens; the prompt has {prompt}, the answer was to have {answer}"
    return refuse(param, rule, code="context_length_exceeded")


def as_api_error(exc: BaseException) -> ApiError:
    """Return what the caller may see of `exc`: our own errors by meaning, a stranger as an id (its text is logged)."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, BaseExceptionGroup):
        return as_api_error(exc.exceptions[0])
    error = errors.as_fathom_error(exc)
    code = ""
    if isinstance(error, errors.PromptTooLong):
        code = "context_length_exceeded"
    elif isinstance(error, errors.ModelNotFound):
        code = "model_not_found"
    elif isinstance(error, errors.InvalidRequest):
        code = "invalid_value"
    retry_after = error.retry_after or (1.0 if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE else 0.0)
    return ApiError(error.http_status, error.message, param=error.field, code=code, retry_after_seconds=retry_after)


def bounded(text: str) -> str:
    """Return a text that is short enough for an error, whatever the caller wrote."""
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "..."
