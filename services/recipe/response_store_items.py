"""How are the items of a response or a conversation kept in order and read page by page?"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import orjson
from sqlalchemy import Connection, Table, func, insert, select

from services.recipe.response_state import Item, Page

MAX_ID_CHARACTERS: Final = 128


def as_key(given: str) -> str:
    """Return what stands for an id in a column: itself, or a hash of one that no database would take.

    Callers name items as they like, and ask for ids as they like: with NUL, which PostgreSQL refuses, or a megabyte
    long, which no index holds.
    """
    if len(given) <= MAX_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return f"sha256:{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()}"


def as_rows(holder_id: str, items: Sequence[Item], *, first: int = 0) -> list[dict[str, Any]]:
    """Return the rows of items at positions from `first` on."""
    return [
        {"holder_id": holder_id, "position": position, "item_id": as_key(str(item["id"])), "body": orjson.dumps(item)}
        for position, item in enumerate(items, first)
    ]


def body_bytes(rows: Sequence[dict[str, Any]]) -> int:
    """Return the size of the items in `rows`."""
    return sum(len(row["body"]) for row in rows)


def insert_rows(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows, of which there may be none."""
    if rows:
        connection.execute(insert(table), rows)


def read_items(connection: Connection, table: Table, holder_ids: Sequence[str]) -> dict[str, list[Item]]:
    """Return the items of several holders, each one's in order."""
    found: dict[str, list[Item]] = {holder_id: [] for holder_id in holder_ids}
    query = select(table.c.holder_id, table.c.body).where(table.c.holder_id.in_(holder_ids))
    for row in connection.execute(query.order_by(table.c.holder_id, table.c.position)):
        found[row.holder_id].append(orjson.loads(row.body))
    return found


def read_page(
    connection: Connection, table: Table, holder_id: str, *, after: str, limit: int, is_ascending: bool
) -> Page | None:
    """Return the items that follow the item `after` ("": from the beginning); None when it is not there."""
    query = select(table.c.body).where(table.c.holder_id == holder_id)
    if after:
        position = _position(connection, table, holder_id, after)
        if position is None:
            return None
        query = query.where(table.c.position > position if is_ascending else table.c.position < position)
    order = table.c.position if is_ascending else table.c.position.desc()
    bodies = connection.scalars(query.order_by(order).limit(limit + 1)).all()
    return Page([orjson.loads(body) for body in bodies[:limit]], len(bodies) > limit)


def _position(connection: Connection, table: Table, holder_id: str, item_id: str) -> int | None:
    query = select(func.min(table.c.position)).where(table.c.holder_id == holder_id, table.c.item_id == as_key(item_id))
    position: int | None = connection.scalar(query)
    return position
