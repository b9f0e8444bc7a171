"""How long is what kept, how much of it, and what goes first?"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, delete, func, literal, select, text, union_all

from services.chassis.errors import InvalidRequest, Overloaded
from services.recipe.response_state import UNFINISHED
from services.recipe.response_store_tables import CONVERSATIONS, RESPONSES, TENANTS, Now

DAY_SECONDS: Final = 86_400.0
_STEP: Final = 200  # rows looked at together when room is made: a tenant at its limit needs one row for each new one


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What one tenant may keep. Times are by the database's clock."""

    keep_seconds: float = 30 * DAY_SECONDS
    """After the last use: an answer to it, or an item added. Thirty days, as the vendor keeps them."""

    max_rows: int = 10_000
    """Responses and conversations together."""

    max_bytes: int = 512 << 20
    """JSON of all of them, items and events included."""

    lost_seconds: float = 15.0
    """An owner of background responses that was silent for so long is gone."""


DEFAULT_LIMITS: Final = StoreLimits()


@dataclass(frozen=True, slots=True)
class Held:
    """A row that might have to go."""

    table: Table
    id: str
    held_bytes: int


def rows_to_drop(oldest_first: Iterator[Held], *, rows: int, held_bytes: int) -> tuple[list[Held], bool]:
    """Return the fewest of the oldest that free so many rows and bytes, and whether they do."""
    dropped: list[Held] = []
    while rows > 0 or held_bytes > 0:
        row = next(oldest_first, None)
        if row is None:
            return dropped, False
        dropped.append(row)
        rows -= 1
        held_bytes -= row.held_bytes
    return dropped, True


def is_owned() -> ColumnElement[bool]:
    """Return the condition that somebody was given the response to generate and has not finished."""
    return and_(RESPONSES.c.status.in_(UNFINISHED), RESPONSES.c.owner != "")


def is_lost(limits: StoreLimits) -> ColumnElement[bool]:
    """Return the condition that the owner of an unfinished response is gone."""
    return and_(is_owned(), RESPONSES.c.heard_at < Now() - limits.lost_seconds)


class Room:
    """Keeps every tenant within the limits.

    To add up what a tenant holds takes a while, so it is done once for each hundredth of the limit that this process
    added; that much is then freed in advance. Limits below a hundred rows are looked at each time, and exact.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self._spare_rows = limits.max_rows // 100
        self._spare_bytes = limits.max_bytes // 100
        self._left: dict[str, tuple[int, int]] = {}  # by tenant: rows and bytes it may still add unlooked

    def make(self, connection: Connection, tenant: str, *, new_bytes: int, new_rows: int = 1, keep: str = "") -> None:
        """Delete the tenant's expired rows, then those next to expire, until the new ones fit.

        keep: the row that grows, which stays. Responses that are being generated stay too; raise Overloaded when only
        such are left, InvalidRequest when the new ones could never fit. Call it before anything else is locked.
        """
        if new_bytes > self.limits.max_bytes:
            words = f"{new_bytes} bytes of the {self.limits.max_bytes} that can be stored for you"
            raise InvalidRequest(f"this would take {words}")
        left_rows, left_bytes = self._left.get(tenant, (0, 0))
        left = (left_rows - new_rows, left_bytes - new_bytes)
        if min(left) < 0:
            spare_bytes = min(self._spare_bytes, self.limits.max_bytes - new_bytes)
            _lock(connection, tenant)
            self._free(connection, tenant, new_rows + self._spare_rows, new_bytes + spare_bytes, keep)
            left = (self._spare_rows, spare_bytes)
        self._left[tenant] = left

    def trim(self, connection: Connection, tenant: str) -> None:
        """Free what the tenant holds beyond its bytes: answers grow after room was made for them."""
        _, held_bytes = _held(connection, tenant)
        if held_bytes > self.limits.max_bytes:
            with contextlib.suppress(Overloaded):  # what is being generated will be finished some day
                _lock(connection, tenant)
                self._free(connection, tenant, 0, 0, "")

    def _free(self, connection: Connection, tenant: str, new_rows: int, new_bytes: int, keep: str) -> None:
        for table in (RESPONSES, CONVERSATIONS):
            connection.execute(delete(table).where(table.c.tenant == tenant, table.c.expires_at <= Now()))
        rows, held_bytes = _held(connection, tenant)
        rows += new_rows - self.limits.max_rows
        held_bytes += new_bytes - self.limits.max_bytes
        while rows > 0 or held_bytes > 0:
            oldest = _oldest(connection, self.limits, tenant, keep)
            dropped, is_enough = rows_to_drop(iter(oldest), rows=rows, held_bytes=held_bytes)
            if not dropped:
                raise Overloaded("no more can be stored for you while what is stored is still being generated")
            for table in (RESPONSES, CONVERSATIONS):  # in this order everywhere, so that nobody waits in a circle
                ids = [row.id for row in dropped if row.table is table]
                connection.execute(delete(table).where(table.c.id.in_(ids)))
            if is_enough:
                return
            rows -= len(dropped)
            held_bytes -= sum(row.held_bytes for row in dropped)


def drop_expired(connection: Connection) -> int:
    """Delete everybody's expired rows; return how many."""
    num_expired = 0
    for table in (RESPONSES, CONVERSATIONS):
        num_expired += connection.execute(delete(table).where(table.c.expires_at <= Now())).rowcount
    return num_expired


def find_tenants(connection: Connection) -> Sequence[str]:
    """Return all tenants that ever stored anything."""
    return connection.scalars(select(TENANTS.c.tenant)).all()


def _lock(connection: Connection, tenant: str) -> None:
    """Let nobody else look for room of this tenant until this transaction ends."""
    # The same words in both databases, but for SQLAlchemy they are two dialects'.
    count = text(
        "INSERT INTO fathom_tenants (tenant, num_looks) VALUES (:tenant, 1) "
        "ON CONFLICT (tenant) DO UPDATE SET num_looks = fathom_tenants.num_looks + 1"
    )
    connection.execute(count, {"tenant": tenant})


def _held(connection: Connection, tenant: str) -> tuple[int, int]:
    """Return how many rows and bytes the tenant has."""
    rows = held_bytes = 0
    for table in (RESPONSES, CONVERSATIONS):
        amount = select(func.count(), func.coalesce(func.sum(table.c.held_bytes), 0)).where(table.c.tenant == tenant)
        found = connection.execute(amount).one()
        rows += int(found[0])
        held_bytes += int(found[1])
    return rows, held_bytes


def _oldest(connection: Connection, limits: StoreLimits, tenant: str, keep: str) -> list[Held]:
    tables = {table.name: table for table in (RESPONSES, CONVERSATIONS)}

    def held(table: Table, *conditions: ColumnElement[bool]) -> Select[tuple[str, str, int, float, float]]:
        columns = (literal(table.name).label("kind"), table.c.id, table.c.held_bytes)
        ages = (table.c.expires_at, table.c.created_at)
        return select(*columns, *ages).where(table.c.tenant == tenant, table.c.id != keep, *conditions)

    # Next to expire is least recently used, since every use renews the expiry.
    both = union_all(held(RESPONSES, ~is_owned() | is_lost(limits)), held(CONVERSATIONS)).subquery()
    query = select(both).order_by(both.c.expires_at, both.c.created_at, both.c.id).limit(_STEP)
    return [Held(tables[row.kind], row.id, row.held_bytes) for row in connection.execute(query)]
