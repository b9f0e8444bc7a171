"""What is remembered between requests of the Responses API, and what must a store of it promise?

The routes talk to `ResponseState` alone. Everything belongs to a tenant ("" while keys are off), and what belongs to
another tenant is not there. Every call has a deadline and raises `StateAway` when the store does not answer within it.
JSON objects go in and come out as they were.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from services.chassis.errors import NoReplica

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
UNFINISHED: Final = frozenset({"queued", "in_progress"})
MAX_LINEAGE = 1000
"""Longest chain of previous_response_id that is followed."""

Item = Mapping[str, Any]
"""An input or output item as the API shows it; it has an "id" of its own."""


class StateAway(NoReplica):
    """The store does not answer: a 503 for requests that need it, nothing to those that do not."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what its follow-ups need.

    body: the response object as GET shows it, "output" included; its "status" equals `status`.
    input_items: what this request itself added to the context, in order. instructions are not among them.
    owner: who generates a background response (its boot id); "" for others.
    keeps_events: whether its stream can be resumed.  created_at: seconds since the Unix epoch.
    """

    id: str
    tenant: str
    status: Status
    body: Mapping[str, Any]
    input_items: Sequence[Item] = ()
    previous_response_id: str = ""
    conversation_id: str = ""
    owner: str = ""
    keeps_events: bool = False
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One stream event of a response. number: its sequence_number, from 0; body: the event as JSON."""

    number: int
    body: bytes


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation without its items. created_at: seconds since the Unix epoch."""

    id: str
    tenant: str
    created_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page:
    """Some items of a list, in the order asked for, and whether there are more behind them."""

    items: Sequence[Item]
    has_more: bool


class ResponseState(Protocol):
    """Keeps responses, their events, and conversations, until they are deleted, expire, or make room for newer ones."""

    async def add(self, response: StoredResponse) -> None:
        """Keep a new response.

        Adding one with previous_response_id renews the expiry of its whole lineage, so that a chain in use stays whole.
        """

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response, None when there is none.

        An unfinished one whose owner has not called `beat` for a while is finished here: its status, and that in its
        body, become "failed", and the body's "error" {"code": "server_error", "message": what happened}.
        """

    async def finish(self, tenant: str, response_id: str, status: Status, body: Mapping[str, Any]) -> bool:
        """Replace status and body, and append input and output items to its conversation, if it has one.

        Return False, having changed nothing, when the response is gone or was finished before; an `in_progress` status
        is allowed too, and appends nothing. Both effects happen together or not at all.
        """

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response with its events; return whether it was there. `beat` then tells its owner to stop."""

    async def lineage(self, tenant: str, response_id: str) -> Sequence[StoredResponse] | None:
        """Return the response and all before it, oldest first; None when one is missing or they exceed MAX_LINEAGE."""

    async def input_items(
        self, tenant: str, response_id: str, *, after: str, limit: int, is_ascending: bool
    ) -> Page | None:
        """Return the response's input items that follow the item `after` ("": from the beginning) in that order.

        None when the response, or the item, is not there.
        """

    async def add_events(self, tenant: str, response_id: str, events: Sequence[StoredEvent]) -> None:
        """Append events, whose numbers go on where the last ended. Those of a deleted response vanish."""

    async def events(self, tenant: str, response_id: str, *, after: int, limit: int) -> Sequence[StoredEvent]:
        """Return at most `limit` events with numbers above `after` (-1: all), in order and without gaps."""

    async def cancel(self, tenant: str, response_id: str) -> bool:
        """Ask the owner of an unfinished response to stop, by `beat`; return whether there was one to ask."""

    async def beat(self, owner: str, response_ids: Collection[str]) -> frozenset[str]:
        """Say that `owner` works on these; return those that it should stop: cancelled, deleted, or given up."""

    async def add_conversation(self, conversation: StoredConversation, items: Sequence[Item]) -> None:
        """Keep a new conversation."""

    async def conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """Return a conversation, None when there is none."""

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> StoredConversation | None:
        """Replace its metadata and return it, None when there is none."""

    async def delete_conversation(self, tenant: str, conversation_id: str) -> bool:
        """Delete it with its items (responses stay); return whether it was there."""

    async def add_items(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> bool:
        """Append items to a conversation; return whether it was there."""

    async def conversation_items(
        self, tenant: str, conversation_id: str, *, after: str, limit: int, is_ascending: bool
    ) -> Page | None:
        """Return a conversation's items, as `input_items` does for a response."""

    async def conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> Item | None:
        """Return one item, None when it is not there."""

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> bool:
        """Delete one item; return whether it was there."""
