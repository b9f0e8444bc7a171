"""READ THIS FIRST of response_store*: how are responses and their events kept, whoever of several replicas asks?

One transaction a call. A response that is being generated has an owner, which says every few seconds that it is alive;
who finds it silent gives the response up, and from then on the owner's own writes change nothing.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import orjson
from sqlalchemy import CTE, ColumnElement, Connection, Select, and_, delete, func, insert, literal, select, update

from services.chassis import telemetry
from services.chassis.errors import InternalError, as_fathom_error
from services.recipe.response_state import (
    MAX_LINEAGE,
    UNFINISHED,
    Item,
    Page,
    Status,
    StoredEvent,
    StoredResponse,
)
from services.recipe.response_store_conversations import ConversationStore, append_items
from services.recipe.response_store_items import as_key, as_rows, body_bytes, insert_rows, read_items, read_page
from services.recipe.response_store_link import QUERY_SECONDS, StoreLink, read_state_url
from services.recipe.response_store_room import (
    DEFAULT_LIMITS,
    Room,
    StoreLimits,
    drop_expired,
    find_tenants,
    is_lost,
    is_owned,
)
from services.recipe.response_store_tables import EVENTS, INPUT_ITEMS, RESPONSES, Now

SWEEP_SECONDS: Final = 60.0
_MOMENT: Final = 0.001  # of the time that things are kept: 43 minutes of 30 days
_LOST_MESSAGE: Final = "the replica that was generating this response is gone"
_COLUMNS: Final = (
    *(RESPONSES.c.id, RESPONSES.c.tenant, RESPONSES.c.status, RESPONSES.c.body, RESPONSES.c.previous_response_id),
    *(RESPONSES.c.conversation_id, RESPONSES.c.owner, RESPONSES.c.keeps_events, RESPONSES.c.created_at),
)


class ResponseStore(ConversationStore):
    """`ResponseState` on SQLite (one machine) or PostgreSQL (several replicas); the protocol says what each call does.

    Every call raises StateAway when the database does not do it within `query_seconds`. `add`, `add_conversation` and
    `add_items` raise InvalidRequest for what is larger than all that a tenant may keep, and Overloaded when only
    responses that are being generated could make room.
    """

    def __init__(
        self, state_url: str, limits: StoreLimits = DEFAULT_LIMITS, *, query_seconds: float = QUERY_SECONDS
    ) -> None:
        self._link = StoreLink(read_state_url(state_url), query_seconds=query_seconds)
        self._limits = limits
        self._room = Room(limits)

    async def tend(self) -> None:
        """Sweep for ever: what expired is deleted even if nobody asks for it."""
        while True:
            try:
                await self.sweep()
            except Exception as exc:  # noqa: BLE001 - a store at fault must not end a recipe that can do without
                as_fathom_error(exc)  # reports what is not reported yet; the next round may go well
            await asyncio.sleep(SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Delete what expired or is too much, so that nothing of it is left in the database's files either."""
        num_expired = await self._link.write(drop_expired)
        for tenant in await self._link.read(find_tenants):
            await self._trim(tenant)
        await self._link.tidy()
        if num_expired:
            telemetry.log.info("state.swept", num_expired=num_expired)

    async def close(self) -> None:
        """Close the connections."""
        await self._link.close()

    async def add(self, response: StoredResponse) -> None:
        rows = as_rows(response.id, response.input_items)
        body = orjson.dumps(dict(response.body))
        values = {name: getattr(response, name) for name in _PLAIN} | {
            "expires_at": Now() + self._limits.keep_seconds,
            "held_bytes": len(body) + body_bytes(rows),
            "num_events": 0,
            "heard_at": Now(),
            "is_cancel_asked": False,
            "is_given_up": False,
            "body": body,
        }

        def work(connection: Connection) -> None:
            if response.previous_response_id:
                self._renew(connection, response.tenant, response.previous_response_id)
            self._room.make(connection, response.tenant, new_bytes=len(body) + body_bytes(rows))
            connection.execute(insert(RESPONSES).values(values))
            insert_rows(connection, INPUT_ITEMS, rows)

        await self._link.write(work)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = await self._link.read(lambda connection: self._find(connection, tenant, response_id))
        if found is None:
            return None
        response, is_silent = found
        if not is_silent:
            return response
        await self._link.write(lambda connection: self._give_up(connection, tenant, response))
        found = await self._link.read(lambda connection: self._find(connection, tenant, response_id))
        return None if found is None else found[0]

    async def finish(self, tenant: str, response_id: str, status: Status, body: Mapping[str, Any]) -> bool:
        return await self._link.write(
            lambda connection: self._finish(connection, tenant, response_id, status, body, is_given_up=False)
        )

    async def delete(self, tenant: str, response_id: str) -> bool:
        def work(connection: Connection) -> bool:
            return connection.execute(delete(RESPONSES).where(_is(tenant, response_id))).rowcount == 1

        return await self._link.write(work)

    async def lineage(self, tenant: str, response_id: str) -> Sequence[StoredResponse] | None:
        line = _line(response_id)
        is_there = and_(RESPONSES.c.tenant == tenant, RESPONSES.c.expires_at > Now())
        query = select(*_COLUMNS, is_there.label("is_there")).join(line, line.c.id == RESPONSES.c.id)

        def work(connection: Connection) -> Sequence[StoredResponse] | None:
            rows = connection.execute(query.order_by(line.c.depth.desc())).all()
            if not rows or rows[0].previous_response_id or not all(row.is_there for row in rows):
                return None  # one of them is missing, or there are more
            items = read_items(connection, INPUT_ITEMS, [row.id for row in rows])
            return [_response(row, items[row.id]) for row in rows]

        return await self._link.read(work)

    async def input_items(
        self, tenant: str, response_id: str, *, after: str, limit: int, is_ascending: bool
    ) -> Page | None:
        def work(connection: Connection) -> Page | None:
            if connection.scalar(select(RESPONSES.c.id).where(_is(tenant, response_id))) is None:
                return None
            return read_page(connection, INPUT_ITEMS, response_id, after=after, limit=limit, is_ascending=is_ascending)

        return await self._link.read(work)

    async def add_events(self, tenant: str, response_id: str, events: Sequence[StoredEvent]) -> None:
        """As the protocol says. What is there is skipped: who got no answer may send events again."""
        if not events:
            return
        where = (_is(tenant, response_id), ~RESPONSES.c.is_given_up)

        def work(connection: Connection) -> None:
            num_events = connection.scalar(select(RESPONSES.c.num_events).where(*where).with_for_update())
            if num_events is None:
                return
            new = [event for event in events if event.number >= num_events]
            if [event.number for event in new] != list(range(num_events, num_events + len(new))):
                raise InternalError(f"events {[event.number for event in events]} do not follow {num_events} others")
            if not new:
                return
            held_bytes = RESPONSES.c.held_bytes + sum(len(event.body) for event in new)
            change = update(RESPONSES).where(RESPONSES.c.id == response_id)
            connection.execute(change.values(num_events=num_events + len(new), held_bytes=held_bytes))
            rows = [{"response_id": response_id, "number": event.number, "body": event.body} for event in new]
            connection.execute(insert(EVENTS), rows)

        await self._link.write(work)

    async def events(self, tenant: str, response_id: str, *, after: int, limit: int) -> Sequence[StoredEvent]:
        query = (
            select(EVENTS.c.number, EVENTS.c.body)
            .join(RESPONSES)
            .where(_is(tenant, response_id), EVENTS.c.number > after)
            .order_by(EVENTS.c.number)
            .limit(limit)
        )

        def work(connection: Connection) -> Sequence[StoredEvent]:
            return [StoredEvent(row.number, row.body) for row in connection.execute(query)]

        return await self._link.read(work)

    async def cancel(self, tenant: str, response_id: str) -> bool:
        change = update(RESPONSES).where(_is(tenant, response_id), is_owned(), ~is_lost(self._limits))

        def work(connection: Connection) -> bool:
            return connection.execute(change.values(is_cancel_asked=True)).rowcount == 1

        return await self._link.write(work)

    async def beat(self, owner: str, response_ids: Collection[str]) -> frozenset[str]:
        if not response_ids:
            return frozenset()
        mine = and_(RESPONSES.c.id.in_(response_ids), RESPONSES.c.owner == owner, is_owned())
        going_on = select(RESPONSES.c.id).where(mine, ~RESPONSES.c.is_cancel_asked, RESPONSES.c.expires_at > Now())

        def work(connection: Connection) -> frozenset[str]:
            connection.execute(update(RESPONSES).where(mine).values(heard_at=Now()))
            return frozenset(response_ids) - frozenset(connection.scalars(going_on).all())

        return await self._link.write(work)

    async def _trim(self, tenant: str) -> None:
        await self._link.write(lambda connection: self._room.trim(connection, tenant))

    def _find(self, connection: Connection, tenant: str, response_id: str) -> tuple[StoredResponse, bool] | None:
        """Return a response as it stands, and whether its owner is gone."""
        query = select(*_COLUMNS, is_lost(self._limits).label("is_silent")).where(_is(tenant, response_id))
        row = connection.execute(query).one_or_none()
        if row is None:
            return None
        items = read_items(connection, INPUT_ITEMS, [response_id])
        return _response(row, items[response_id]), bool(row.is_silent)

    def _give_up(self, connection: Connection, tenant: str, response: StoredResponse) -> None:
        """Finish a response in its owner's place, unless the owner was heard of meanwhile."""
        still = select(RESPONSES.c.id).where(_is(tenant, response.id), is_lost(self._limits)).with_for_update()
        if connection.scalar(still) is None:
            return
        error = {"code": "server_error", "message": _LOST_MESSAGE}
        body = {**response.body, "status": "failed", "error": error}
        self._finish(connection, tenant, response.id, "failed", body, is_given_up=True)
        telemetry.log.warning("state.response.given_up", response_id=response.id, owner=response.owner)

    def _finish(
        self,
        connection: Connection,
        tenant: str,
        response_id: str,
        status: Status,
        body: Mapping[str, Any],
        *,
        is_given_up: bool,
    ) -> bool:
        encoded = orjson.dumps(dict(body))
        change = (
            update(RESPONSES)
            .where(_is(tenant, response_id), RESPONSES.c.status.in_(UNFINISHED))
            .values(
                status=status,
                body=encoded,
                held_bytes=RESPONSES.c.held_bytes - func.length(RESPONSES.c.body) + len(encoded),
                is_given_up=is_given_up,
            )
            .returning(RESPONSES.c.conversation_id)
        )
        conversation_id = connection.scalar(change)
        if conversation_id is None:
            return False
        if conversation_id and status not in UNFINISHED:
            said = read_items(connection, INPUT_ITEMS, [response_id])[response_id]
            items = [*said, *body.get("output", ())]
            append_items(connection, self._limits, tenant, conversation_id, items)
        return True

    def _renew(self, connection: Connection, tenant: str, response_id: str) -> None:
        keep_seconds = self._limits.keep_seconds
        line = _line(response_id)
        # Those renewed a moment ago are left: a long conversation would rewrite itself with every turn.
        is_due = and_(RESPONSES.c.tenant == tenant, RESPONSES.c.expires_at < Now() + keep_seconds * (1 - _MOMENT))
        due = select(RESPONSES.c.id).join(line, line.c.id == RESPONSES.c.id).where(is_due)
        ids = connection.scalars(due.order_by(RESPONSES.c.id)).all()
        if ids:
            change = update(RESPONSES).where(RESPONSES.c.id.in_(ids), RESPONSES.c.expires_at > Now())
            connection.execute(change.values(expires_at=Now() + keep_seconds))


_PLAIN: Final = (
    *("id", "tenant", "status", "created_at", "owner", "keeps_events", "previous_response_id", "conversation_id"),
)


def _is(tenant: str, response_id: str) -> ColumnElement[bool]:
    own = and_(RESPONSES.c.tenant == tenant, RESPONSES.c.id == as_key(response_id))
    return and_(own, RESPONSES.c.expires_at > Now())


def _line(response_id: str) -> CTE:
    """Return the ids of a response and of those before it with their depths, at most MAX_LINEAGE of them.

    Whoever reads them asks for tenant and expiry: with more than the key to join by, PostgreSQL would look for each
    step's row among all of the tenant's.
    """
    first: Select[tuple[str, str, int]] = select(
        RESPONSES.c.id, RESPONSES.c.previous_response_id, literal(1).label("depth")
    ).where(RESPONSES.c.id == as_key(response_id))
    line = first.cte("line", recursive=True)
    earlier = (
        select(RESPONSES.c.id, RESPONSES.c.previous_response_id, line.c.depth + 1)
        .join(line, RESPONSES.c.id == line.c.previous_response_id)
        .where(line.c.depth < MAX_LINEAGE)
    )
    return line.union_all(earlier)


def _response(row: Any, items: Sequence[Item]) -> StoredResponse:  # a row of _COLUMNS, of whichever query
    return StoredResponse(
        id=row.id,
        tenant=row.tenant,
        status=row.status,
        body=orjson.loads(row.body),
        input_items=items,
        previous_response_id=row.previous_response_id,
        conversation_id=row.conversation_id,
        owner=row.owner,
        keeps_events=row.keeps_events,
        created_at=row.created_at,
    )
