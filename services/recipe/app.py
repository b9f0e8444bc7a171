"""Which paths does the public API have, and what do the others answer?"""

import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.recipe.answering import Endpoint
from services.recipe.generating import Front
from services.recipe.plain_endpoint import PlainEndpoint
from services.recipe.refusals import ApiError, as_api_error
from services.recipe.responses_background import Background
from services.recipe.routes import public_routes
from services.recipe.shapes import shape_of

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def build_app(front: Front, guarded: Callable[[ASGIApp], ASGIApp], background: Background | None = None) -> ASGIApp:
    """Return the ASGI application. guarded: puts before it what lets callers in; background: what is kept, if any."""
    app = FastAPI(title="Fathom", openapi_url=None, redirect_slashes=False)
    routes = public_routes(front, background)
    app.router.routes += routes
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return RequestIds(guarded(Shortcut(app, routes)))


class Shortcut:
    """Leads requests to the endpoints that answer all by themselves, errors included, past the framework's layers.

    They are a fifth of what a short request costs, and of what each event of a stream does.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._endpoints = {
            route.path: route.endpoint
            for route in routes
            if isinstance(route.endpoint, Endpoint | PlainEndpoint) and route.methods == {"POST"}
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        await (self._app if endpoint is None else endpoint)(scope, receive, send)


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

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = shown
                headers[shape_of(scope).id_header.decode()] = shown
            return send(message)

        await self._app(scope, receive, send_with_id)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    error = ApiError(exc.status_code, _MEANINGS.get(exc.status_code, exc.detail))
    return _refused(request, error, dict(exc.headers or {}))


_MEANINGS: dict[int, str] = {
    HTTPStatus.NOT_FOUND: "there is no such endpoint; there are /v1/chat/completions, /v1/responses, /v1/messages, "
    "/v1/completions, /v1/models, /tokenize and /detokenize; GET /docs describes them all",
    HTTPStatus.METHOD_NOT_ALLOWED: "this endpoint does not take that method; the allow header names those it takes",
}


async def _on_error(request: Request, exc: Exception) -> Response:
    error = as_api_error(exc)
    return _refused(request, error, {name.decode(): value.decode() for name, value in error.headers()})


def _refused(request: Request, error: ApiError, headers: dict[str, str]) -> Response:
    shape = shape_of(request.scope)
    body = shape.body(error, str(request.scope["fathom.shown_id"]))
    return Response(body, shape.status(error), headers, "application/json")
