"""What can be done with conversations: made, shown, changed, deleted, and what of their items?"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.recipe.answering import Caller
from services.recipe.body import parse_object, read_body
from services.recipe.fields import Fields
from services.recipe.generating import Front
from services.recipe.identity import read_metadata
from services.recipe.refusals import refuse
from services.recipe.response_state import Item, Page, ResponseState, StoredConversation
from services.recipe.responses_context import not_found
from services.recipe.responses_items import check_items, name_items
from services.recipe.responses_routes import Query, told, told_page

MAX_NEW_ITEMS = 20


class Conversations:
    """The routes of /v1/conversations. state: None when nothing is kept."""

    def __init__(self, front: Front, state: ResponseState | None) -> None:
        self._front = front
        self._state = state

    def routes(self) -> list[Route]:
        """Return them."""
        path = "/v1/conversations/{conversation_id}"
        return [
            Route("/v1/conversations", self.create, methods=["POST"]),
            Route(path, self.show, methods=["GET"]),
            Route(path, self.change, methods=["POST"]),
            Route(path, self.delete, methods=["DELETE"]),
            Route(f"{path}/items", self.items, methods=["GET"]),
            Route(f"{path}/items", self.add_items, methods=["POST"]),
            Route(f"{path}/items/{{item_id}}", self.item, methods=["GET"]),
            Route(f"{path}/items/{{item_id}}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """Make a conversation, with up to MAX_NEW_ITEMS items."""
        fields = await self._body(request)
        metadata, items = read_metadata(fields), self._new_items(fields.take("items") or [])
        fields.finish()
        tenant, name = Caller.of(request.scope).tenant, f"conv_{secrets.token_hex(24)}"
        conversation = StoredConversation(name, tenant, time.time(), metadata)
        await self._kept().add_conversation(conversation, items)
        return told(_shown(conversation))

    async def show(self, request: Request) -> Response:
        """Return the conversation."""
        return told(_shown(await self._found(request)))

    async def change(self, request: Request) -> Response:
        """Replace its metadata."""
        found, fields = await self._found(request), await self._body(request)
        metadata = read_metadata(fields)
        fields.finish()
        changed = await self._kept().set_metadata(found.tenant, found.id, metadata)
        if changed is None:
            raise not_found("conversation", found.id)
        return told(_shown(changed))

    async def delete(self, request: Request) -> Response:
        """Delete it with its items; the responses that were made in it stay."""
        found = await self._found(request)
        if not await self._kept().delete_conversation(found.tenant, found.id):
            raise not_found("conversation", found.id)
        return told({"id": found.id, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        """Return a page of its items."""
        query = Query(request, ("after", "limit", "order", "include"))
        found = await self._found(request)
        page = await self._kept().conversation_items(found.tenant, found.id, **query.page())
        return told_page(page, query.text("after"))

    async def add_items(self, request: Request) -> Response:
        """Append up to MAX_NEW_ITEMS items and return them."""
        Query(request, ("include",))
        found, fields = await self._found(request), await self._body(request)
        items = self._new_items(fields.take("items"))
        fields.finish()
        if not await self._kept().add_items(found.tenant, found.id, items):
            raise not_found("conversation", found.id)
        return told_page(Page(items, has_more=False), "")

    async def item(self, request: Request) -> Response:
        """Return one item."""
        found, name = await self._found(request), request.path_params["item_id"]
        item = await self._kept().conversation_item(found.tenant, found.id, name)
        if item is None:
            raise not_found("item_id", name)
        return told(item)

    async def delete_item(self, request: Request) -> Response:
        """Delete one item and return the conversation."""
        found, name = await self._found(request), request.path_params["item_id"]
        if not await self._kept().delete_item(found.tenant, found.id, name):
            raise not_found("item_id", name)
        return told(_shown(found))

    def _kept(self) -> ResponseState:
        if self._state is None:
            rule = "this server keeps none (its setting state_url is empty)"
            raise refuse("conversation", rule, code="state_is_off")
        return self._state

    async def _body(self, request: Request) -> Fields:
        body = await read_body(request.headers, request.receive, self._front.max_body_bytes)
        return Fields(parse_object(body) if body else {})

    def _new_items(self, given: Any) -> Sequence[Item]:
        if not isinstance(given, list) or len(given) > MAX_NEW_ITEMS:
            raise refuse("items", f"must be a list of at most {MAX_NEW_ITEMS} items")
        items = name_items(given, "items")
        check_items(items, "items", self._front.model.rules)
        return items

    async def _found(self, request: Request) -> StoredConversation:
        name = request.path_params["conversation_id"]
        found = await self._kept().conversation(Caller.of(request.scope).tenant, name)
        if found is None:
            raise not_found("conversation", name)
        return found


def _shown(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": dict(conversation.metadata),
    }
