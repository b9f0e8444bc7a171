"""What can be done with responses that are kept: shown, followed, listed, cancelled, deleted?"""

from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from services.chassis.errors import FathomError
from services.recipe.answering import Caller
from services.recipe.refusals import as_api_error, refuse
from services.recipe.response_state import Page, StoredResponse
from services.recipe.responses_background import Background
from services.recipe.responses_context import not_found
from services.recipe.responses_endpoint import named_json
from services.recipe.responses_events import telling_failed
from services.recipe.shapes import named_frame
from services.recipe.stream import EVENT_STREAM, PING

MAX_PAGE = 100
_USUAL_PAGE = 20


class StoredResponses:
    """The routes below /v1/responses/{id}. background: None when there is no state, and so no response."""

    def __init__(self, background: Background | None) -> None:
        self._background = background

    def routes(self) -> list[Route]:
        """Return them."""
        path = "/v1/responses/{response_id}"
        return [
            Route(path, self.show, methods=["GET"]),
            Route(path, self.delete, methods=["DELETE"]),
            Route(f"{path}/cancel", self.cancel, methods=["POST"]),
            Route(f"{path}/input_items", self.input_items, methods=["GET"]),
        ]

    async def show(self, request: Request) -> Response:
        """Return the response, or with stream=true its events above number starting_after."""
        query = Query(request, ("stream", "starting_after", "include", "include_obfuscation"))
        is_stream = query.flag("stream")
        after = query.integer("starting_after", -1, 0, (1 << 53) - 1)
        if query.flag("include_obfuscation"):
            raise refuse("include_obfuscation", "true is not served here")
        background, stored = await self._stored(request)
        if not is_stream:
            if after >= 0:
                raise refuse("starting_after", "needs stream=true")
            return told(stored.body)
        if not stored.keeps_events:
            raise refuse("stream", "is for responses that were created with background and stream")
        headers = {name.decode(): value.decode() for name, value in EVENT_STREAM}
        return StreamingResponse(_frames(background, stored, after), headers=headers)

    async def delete(self, request: Request) -> Response:
        """Delete the response; if it is being generated, that ends."""
        background, stored = await self._stored(request)
        background.stop(stored.id)
        if not await background.state.delete(stored.tenant, stored.id):
            raise not_found("response_id", stored.id)
        return told({"id": stored.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Stop a background response, whichever replica generates it, and return what there is of it."""
        background, stored = await self._stored(request)
        if not stored.body.get("background"):
            raise refuse("response_id", "is not of a background response; only those can be cancelled")
        cancelled = await background.cancelled(stored.tenant, stored.id)
        if cancelled is None:
            raise not_found("response_id", stored.id)
        return told(cancelled.body)

    async def input_items(self, request: Request) -> Response:
        """Return a page of what the response's request itself added to the context."""
        query = Query(request, ("after", "before", "limit", "order", "include"))
        background, stored = await self._stored(request)
        page = await background.state.input_items(stored.tenant, stored.id, **query.page())
        return told_page(page, query.text("after"))

    async def _stored(self, request: Request) -> tuple[Background, StoredResponse]:
        name = request.path_params["response_id"]
        if self._background is not None:
            stored = await self._background.state.get(Caller.of(request.scope).tenant, name)
            if stored is not None:
                return self._background, stored
        raise not_found("response_id", name)


class Query:
    """A request's query string; parameters that nobody knows are refused."""

    def __init__(self, request: Request, known: tuple[str, ...]) -> None:
        self._given = {name.removesuffix("[]"): value for name, value in request.query_params.items()}
        unknown = next((name for name in self._given if name not in known), None)
        if unknown is not None:
            raise refuse(unknown[:100], "is not a parameter of this request", code="unknown_parameter")

    def text(self, name: str) -> str:
        """Return a parameter, "" when it is absent."""
        return self._given.get(name, "")

    def flag(self, name: str) -> bool:
        """Return true or false, false when it is absent."""
        value = self.text(name)
        if value not in ("", "true", "false"):
            raise refuse(name, "must be true or false")
        return value == "true"

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Return an integer of low..high."""
        value = self.text(name)
        if not value:
            return default
        if not (value.isascii() and value.isdigit() and len(value) <= 16 and low <= int(value) <= high):
            raise refuse(name, f"must be an integer from {low} to {high}")
        return int(value)

    def page(self) -> dict[str, Any]:
        """Return which page of a list is wanted, as the state takes it."""
        order = self.text("order") or "desc"
        if order not in ("asc", "desc"):
            raise refuse("order", 'must be "asc" or "desc"')
        if self.text("before"):
            raise refuse("before", "is not served here; use after, with the other order")
        limit = self.integer("limit", _USUAL_PAGE, 1, MAX_PAGE)
        return {"after": self.text("after"), "limit": limit, "is_ascending": order == "asc"}


def told(body: Mapping[str, Any]) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(dict(body)), HTTPStatus.OK, media_type="application/json")


def told_page(page: Page | None, after: str) -> Response:
    """Return a page of items; None: the item to go on after is not there."""
    if page is None:
        raise not_found("after", after)
    items = list(page.items)
    ends: dict[str, Any] = {"first_id": None, "last_id": None}
    if items:
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    return told({"object": "list", "data": items, **ends, "has_more": page.has_more})


async def _frames(background: Background, stored: StoredResponse, after: int) -> AsyncIterator[bytes]:
    try:
        async for event in background.follow(stored.tenant, stored.id, after):
            yield named_json(event) if event else PING
            after += bool(event)
    except FathomError as exc:
        yield named_frame(telling_failed(as_api_error(exc), after + 1))
