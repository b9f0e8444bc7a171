"""How are POST requests answered that generate nothing? JSON in, JSON out, errors in the right shape."""

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.chassis import telemetry
from services.chassis.errors import NoReplica
from services.recipe.answering import Caller
from services.recipe.body import parse_object, read_body
from services.recipe.generating import Front
from services.recipe.refusals import as_api_error
from services.recipe.shapes import shape_of
from services.recipe.stream import FAREWELL_SECONDS, ClientGoneError, cancelled_on_disconnect, send_whole


class PlainEndpoint:
    """ASGI application for one path; subclasses know the answer."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def answer(self, body: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """Return the answer to the request in `body`; raise ApiError when there is none."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; its errors end here too."""
        caller, headers = Caller.of(scope), Headers(scope=scope)
        telemetry.bind_request(caller.request_id)
        try:
            body = await read_body(headers, receive, self.front.max_body_bytes)
            async with cancelled_on_disconnect(receive):
                told = await self.answer(parse_object(body), caller)
        except ClientGoneError:
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            async with asyncio.timeout(FAREWELL_SECONDS):
                await _fail(scope, send, caller, NoReplica("this server is shutting down"))
        except Exception as exc:  # noqa: BLE001 - every error has an answer; strangers are logged with an id
            await _fail(scope, send, caller, exc)
        else:
            await send_whole(send, HTTPStatus.OK, orjson.dumps(told))


async def _fail(scope: Scope, send: Send, caller: Caller, exc: Exception) -> None:
    error, shape = as_api_error(exc), shape_of(scope)
    await send_whole(send, shape.status(error), shape.body(error, caller.shown_id), error.headers())
