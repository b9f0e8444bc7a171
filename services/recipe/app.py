"""Which paths does the public API have, and what do the others answer?"""

import re
import time
import uuid
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.chassis import errors
from services.recipe.answering import ChatEndpoint, CompletionEndpoint, Front, check_model
from services.recipe.refusals import ApiError, as_api_error

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def build_app(front: Front) -> ASGIApp:
    """Return the ASGI application."""
    app = FastAPI(title="Fathom", openapi_url=None, redirect_slashes=False)
    models = _Models(front)
    app.router.routes += [
        Route("/v1/chat/completions", ChatEndpoint(front), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(front), methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.show, methods=["GET"]),
        Route("/health", models.health, methods=["GET"]),
    ]
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return RequestIds(app)


class RequestIds:
    """Gives every request an id of its own, and every response an x-request-id: the caller's if it is a sane one.

    The caller's id is not ours inside: two callers may choose the same.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with our id and the shown one in its scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["fathom.request_id"] = own = uuid.uuid4().hex
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        scope["fathom.shown_id"] = shown = given if _SANE_ID.fullmatch(given) else own

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = shown
            await send(message)

        await self._app(scope, receive, send_with_id)


class _Models:
    """The model list, and whether the model can be reached."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def list(self, _request: Request) -> Response:
        return _json(HTTPStatus.OK, {"object": "list", "data": [self._model()]})

    async def show(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._front.model.name)
        return _json(HTTPStatus.OK, self._model())

    async def health(self, _request: Request) -> Response:
        """200 when the entrypoint answers and has the model."""
        try:
            card = await self._front.upstream.find_model()
            reason = "no ready replicas serve the model"
        except errors.FathomError as exc:
            card, reason = None, exc.message
        if card is None:
            unavailable = {"status": "unavailable", "reason": reason}
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, unavailable, {"retry-after": "1"})
        return _json(HTTPStatus.OK, {"status": "ok", "model": card.name})

    def _model(self) -> dict[str, Any]:
        model = self._front.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "fathom",
            "max_model_len": self._front.context_tokens,
        }


async def _on_http_exception(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    error = ApiError(exc.status_code, _MEANINGS.get(exc.status_code, exc.detail))
    return Response(error.body(), exc.status_code, dict(exc.headers or {}), "application/json")


_MEANINGS: dict[int, str] = {
    HTTPStatus.NOT_FOUND: "there is no such endpoint; there are /v1/chat/completions, /v1/completions, /v1/models",
    HTTPStatus.METHOD_NOT_ALLOWED: "this endpoint does not take that method; the allow header names those it takes",
}


async def _on_error(_request: Request, exc: Exception) -> Response:
    error = as_api_error(exc)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers, "application/json")


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")
