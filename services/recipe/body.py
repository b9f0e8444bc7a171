"""Is the request body small enough, and a JSON object?"""

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive

from services.recipe.limits import check_json, check_unparsed
from services.recipe.refusals import ApiError, refuse
from services.recipe.stream import ClientGoneError

QUIET_SECONDS = 30.0
"""Longest wait for the next part of a body; whoever sends nothing for so long will not."""


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body; raise a 413 as soon as it is known to be longer than max_bytes.

    Raises a 408, after which the connection must be closed, when nothing comes for QUIET_SECONDS.
    """
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    more = True
    while more:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                message = await receive()
        except TimeoutError:
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body stopped for {QUIET_SECONDS:g} seconds") from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; raise a 400 for anything else.

    The parser refuses invalid UTF-8, half surrogate pairs, NaN and Infinity, and nesting of more than 1024 levels,
    the last before it builds anything.
    """
    check_unparsed(body)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise refuse("", f"the body is not valid JSON: {exc}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise refuse("", "the body must be a JSON object", code="invalid_json")
    check_json(body, parsed)
    return parsed


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {max_bytes} bytes")
