"""How are conversations kept?"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, Select, and_, delete, func, insert, select, update

from services.recipe.response_state import Item, Page, StoredConversation
from services.recipe.response_store_items import as_key, as_rows, body_bytes, insert_rows, read_page
from services.recipe.response_store_link import StoreLink
from services.recipe.response_store_room import Room, StoreLimits
from services.recipe.response_store_tables import CONVERSATION_ITEMS, CONVERSATIONS, Now


class ConversationStore:
    """The conversations' part of `ResponseState`, which says what each of these does."""

    _link: StoreLink
    _limits: StoreLimits
    _room: Room

    async def add_conversation(self, conversation: StoredConversation, items: Sequence[Item]) -> None:
        rows = as_rows(conversation.id, items)
        metadata = orjson.dumps(dict(conversation.metadata))
        held_bytes = len(metadata) + body_bytes(rows)
        values = {
            "id": conversation.id,
            "tenant": conversation.tenant,
            "created_at": conversation.created_at,
            "expires_at": Now() + self._limits.keep_seconds,
            "held_bytes": held_bytes,
            "num_items": len(rows),
            "metadata": metadata,
        }

        def work(connection: Connection) -> None:
            self._room.make(connection, conversation.tenant, new_bytes=held_bytes)
            connection.execute(insert(CONVERSATIONS).values(values))
            insert_rows(connection, CONVERSATION_ITEMS, rows)

        await self._link.write(work)

    async def conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        def work(connection: Connection) -> StoredConversation | None:
            columns = (CONVERSATIONS.c.created_at, CONVERSATIONS.c.metadata)
            row = connection.execute(select(*columns).where(_is(tenant, conversation_id))).one_or_none()
            if row is None:
                return None
            return StoredConversation(conversation_id, tenant, row.created_at, orjson.loads(row.metadata))

        return await self._link.read(work)

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> StoredConversation | None:
        body = orjson.dumps(dict(metadata))
        change = (
            update(CONVERSATIONS)
            .where(_is(tenant, conversation_id))
            .values(
                metadata=body,
                held_bytes=CONVERSATIONS.c.held_bytes - func.length(CONVERSATIONS.c.metadata) + len(body),
                expires_at=Now() + self._limits.keep_seconds,
            )
            .returning(CONVERSATIONS.c.created_at)
        )

        def work(connection: Connection) -> StoredConversation | None:
            created_at = connection.scalar(change)
            if created_at is None:
                return None
            return StoredConversation(conversation_id, tenant, created_at, dict(metadata))

        return await self._link.write(work)

    async def delete_conversation(self, tenant: str, conversation_id: str) -> bool:
        def work(connection: Connection) -> bool:
            return connection.execute(delete(CONVERSATIONS).where(_is(tenant, conversation_id))).rowcount == 1

        return await self._link.write(work)

    async def add_items(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> bool:
        new_bytes = body_bytes(as_rows(conversation_id, items))

        def work(connection: Connection) -> bool:
            self._room.make(connection, tenant, new_bytes=new_bytes, new_rows=0, keep=conversation_id)
            return append_items(connection, self._limits, tenant, conversation_id, items)

        return await self._link.write(work)

    async def conversation_items(
        self, tenant: str, conversation_id: str, *, after: str, limit: int, is_ascending: bool
    ) -> Page | None:
        def work(connection: Connection) -> Page | None:
            if connection.scalar(_exists(tenant, conversation_id)) is None:
                return None
            return read_page(
                connection, CONVERSATION_ITEMS, conversation_id, after=after, limit=limit, is_ascending=is_ascending
            )

        return await self._link.read(work)

    async def conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> Item | None:
        query = (
            select(CONVERSATION_ITEMS.c.body)
            .join(CONVERSATIONS)
            .where(_is(tenant, conversation_id), CONVERSATION_ITEMS.c.item_id == as_key(item_id))
            .order_by(CONVERSATION_ITEMS.c.position)
            .limit(1)
        )

        def work(connection: Connection) -> Item | None:
            body = connection.scalar(query)
            return None if body is None else _loads(body)

        return await self._link.read(work)

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> bool:
        items = CONVERSATION_ITEMS
        gone = delete(items).where(items.c.holder_id == as_key(conversation_id), items.c.item_id == as_key(item_id))

        def work(connection: Connection) -> bool:
            lock = _exists(tenant, conversation_id).with_for_update()
            if connection.scalar(lock) is None:
                return False
            sizes = connection.scalars(gone.returning(func.length(items.c.body))).all()
            change = update(CONVERSATIONS).where(CONVERSATIONS.c.id == conversation_id)
            connection.execute(change.values(held_bytes=CONVERSATIONS.c.held_bytes - sum(sizes)))
            return bool(sizes)

        return await self._link.write(work)


def append_items(
    connection: Connection, limits: StoreLimits, tenant: str, conversation_id: str, items: Sequence[Item]
) -> bool:
    """Append items to a conversation and renew it; return whether it was there."""
    new_bytes = body_bytes(as_rows(conversation_id, items))
    # The update locks the conversation's row, so that nobody else is given the same positions.
    take_positions = (
        update(CONVERSATIONS)
        .where(_is(tenant, conversation_id))
        .values(
            num_items=CONVERSATIONS.c.num_items + len(items),
            held_bytes=CONVERSATIONS.c.held_bytes + new_bytes,
            expires_at=Now() + limits.keep_seconds,
        )
        .returning(CONVERSATIONS.c.num_items)
    )
    num_items = connection.scalar(take_positions)
    if num_items is None:
        return False
    rows = as_rows(conversation_id, items, first=num_items - len(items))
    insert_rows(connection, CONVERSATION_ITEMS, rows)
    return True


def _is(tenant: str, conversation_id: str) -> ColumnElement[bool]:
    own = and_(CONVERSATIONS.c.tenant == tenant, CONVERSATIONS.c.id == as_key(conversation_id))
    return and_(own, CONVERSATIONS.c.expires_at > Now())


def _exists(tenant: str, conversation_id: str) -> Select[tuple[Any]]:
    return select(CONVERSATIONS.c.id).where(_is(tenant, conversation_id))


def _loads(body: bytes) -> Item:
    item: Item = orjson.loads(body)
    return item
