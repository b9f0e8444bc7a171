"""What does the store of the Responses API look like in SQL?

JSON is kept as bytes, so that length() is its size in both databases. Small columns come before large ones: SQLite then
reads a row's first page only, when it adds up what a tenant holds.
"""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

SCHEMA_VERSION: Final = 1
"""Of these tables. A store with another version is left alone: its rows may mean something else."""

METADATA: Final = MetaData()

SCHEMA: Final = Table("fathom_schema", METADATA, Column("version", Integer, primary_key=True, autoincrement=False))

TENANTS: Final = Table(
    "fathom_tenants",
    METADATA,
    Column("tenant", String, primary_key=True),
    # Whoever looks for a tenant's room counts here first, and so has the tenant's row locked: two replicas that add at
    # the same time would otherwise both find room for one.
    Column("num_looks", BigInteger, nullable=False),
)

RESPONSES: Final = Table(
    "fathom_responses",
    METADATA,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("status", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("held_bytes", BigInteger, nullable=False),
    Column("num_events", Integer, nullable=False),
    Column("keeps_events", Boolean, nullable=False),
    Column("owner", String, nullable=False),
    Column("heard_at", Double, nullable=False),
    Column("is_cancel_asked", Boolean, nullable=False),
    Column("is_given_up", Boolean, nullable=False),
    Column("previous_response_id", String, nullable=False),
    Column("conversation_id", String, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("fathom_responses_by_age", "tenant", "expires_at"),
    Index("fathom_responses_expiry", "expires_at"),
)

EVENTS: Final = Table(
    "fathom_response_events",
    METADATA,
    Column("response_id", ForeignKey(RESPONSES.c.id, ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("body", LargeBinary, nullable=False),
)

CONVERSATIONS: Final = Table(
    "fathom_conversations",
    METADATA,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("held_bytes", BigInteger, nullable=False),
    # Positions given out, also to items that are deleted by now.
    Column("num_items", Integer, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Index("fathom_conversations_by_age", "tenant", "expires_at"),
    Index("fathom_conversations_expiry", "expires_at"),
)


def _items(name: str, holder: Table) -> Table:
    """Return the table of the items of a response or a conversation, in the order of their positions."""
    return Table(
        name,
        METADATA,
        Column("holder_id", ForeignKey(holder.c.id, ondelete="CASCADE"), primary_key=True),
        Column("position", Integer, primary_key=True, autoincrement=False),
        Column("item_id", String, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Index(f"{name}_by_id", "holder_id", "item_id"),
    )


INPUT_ITEMS: Final = _items("fathom_input_items", RESPONSES)
CONVERSATION_ITEMS: Final = _items("fathom_conversation_items", CONVERSATIONS)


class Now(FunctionElement[float]):
    """Seconds since the Unix epoch by the database's clock: replicas' own may differ, and heartbeats must not."""

    type = Double()
    inherit_cache = True


@compiles(Now, "sqlite")
def _now_of_sqlite(_element: Now, _compiler: SQLCompiler, **_: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(Now, "postgresql")
def _now_of_postgresql(_element: Now, _compiler: SQLCompiler, **_: Any) -> str:
    # Not now(), which is when the transaction began: it may have waited for a lock since.
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"
