"""How is the database of the Responses API reached, and what happens when it is away?"""

import asyncio
import contextlib
import os
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, make_url, select, text
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as NoConnectionError
from sqlalchemy.util import greenlet_spawn

from services.chassis import telemetry
from services.recipe.response_state import StateAway
from services.recipe.response_store_tables import METADATA, SCHEMA, SCHEMA_VERSION

QUERY_SECONDS: Final = 5.0
"""Longest wait for one call of the store, whatever it does: a connection, locks, all of its statements."""
POOL_CONNECTIONS: Final = 4
"""SQLite: a thread each. Statements take a millisecond, so that four serve hundreds of requests a second."""

_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
_DEFECTS: Final = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
"""Our fault. All else that a driver says is the database's: not there, full, locked, shutting down, no such user."""
_AWAY: Final = (DBAPIError, NoConnectionError, TimeoutError, OSError, sqlite3.Error)
_LOST_TO_OTHERS: Final = frozenset({"40P01", "40001"})  # deadlock, serialization failure: nothing was done; try again
_TRIES: Final = 4
_SCHEMA_LOCK: Final = 0x6661_7468  # one number for all replicas

T = TypeVar("T")
Work = Callable[[Connection], T]
"""Plain statements. They run in a greenlet, which awaits the driver wherever it waits.

SQLAlchemy's own coroutines (`ext.asyncio`) do the same for each statement, but bring its object mapper along: 7 MB.
"""


def read_state_url(given: str) -> URL:
    """Return where the state is: sqlite:///path or postgresql://user:password@host/name; raise ValueError otherwise."""
    try:
        url = make_url(given)
    except ArgumentError:
        # The text may hold a password, and the library's message would show it.
        raise ValueError("must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME") from None
    if url.drivername not in _DRIVERS or not url.database or url.database == ":memory:":
        raise ValueError("must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME")
    if "sslmode" in url.query:  # libpq's word, which everyone writes; asyncpg's is ssl, with the same values
        url = url.update_query_dict({"ssl": url.query["sslmode"]}).difference_update_query(["sslmode"])
    return url.set(drivername=_DRIVERS[url.drivername])


class StoreLink:
    """Connections to one database, made when first needed. Every call ends within `query_seconds`."""

    def __init__(self, url: URL, *, query_seconds: float = QUERY_SECONDS) -> None:
        self._url = url
        self._query_seconds = query_seconds
        self._is_sqlite = url.get_backend_name() == "sqlite"
        self._engine = _open(url, query_seconds)
        # No BEGIN and no ROLLBACK around a single SELECT: half of a read's time.
        self._reader = self._engine.execution_options(
            **({"fathom_begin": ""} if self._is_sqlite else {"isolation_level": "AUTOCOMMIT"})
        )
        # SQLite has one writer at a time and lets the others poll: here they queue instead.
        self._writer: contextlib.AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if self._is_sqlite else contextlib.nullcontext()
        )
        self._preparing = asyncio.Lock()
        self._is_prepared = False
        self._is_away = False

    async def read(self, work: Work[T]) -> T:
        """Return what `work` finds with statements by themselves; raise StateAway if not in time."""
        async with self._deadline():
            await self._prepare()
            async with _connected(self._reader) as connection:
                return await greenlet_spawn(work, connection)

    async def write(self, work: Work[T]) -> T:
        """As `read`, in one transaction. `work` runs again when another replica's transaction was in its way."""
        async with self._deadline():
            await self._prepare()
            for attempt in range(1, _TRIES + 1):
                try:
                    return await self._write_once(work)
                except DBAPIError as exc:
                    if getattr(exc.orig, "sqlstate", None) not in _LOST_TO_OTHERS or attempt == _TRIES:
                        raise
                await asyncio.sleep(random.uniform(0, 0.02 * attempt))  # noqa: S311 - spreads the contenders
        raise AssertionError  # the last attempt raises

    async def tidy(self) -> None:
        """Remove what deleted rows left in SQLite's journal. PostgreSQL's vacuum does its own part."""
        if not self._is_sqlite:
            return
        async with self._deadline(), self._writer, _connected(self._engine) as connection:
            connection.execution_options(fathom_begin="")  # a checkpoint cannot run in a transaction
            await greenlet_spawn(connection.exec_driver_sql, "PRAGMA wal_checkpoint(TRUNCATE)")

    async def close(self) -> None:
        """Close all connections."""
        await greenlet_spawn(self._engine.dispose)

    async def _write_once(self, work: Work[T]) -> T:
        async with self._writer, _connected(self._engine) as connection:
            connection.execution_options(fathom_begin="BEGIN IMMEDIATE")
            return await greenlet_spawn(_transact, connection, work)

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Turn a database that cannot be reached, or not in time, into StateAway; log when that begins and ends."""
        try:
            async with asyncio.timeout(self._query_seconds):
                yield
        except _DEFECTS:
            raise
        except _AWAY as exc:
            if not self._is_away:
                self._is_away = True
                telemetry.log.warning("state.away", error=type(exc).__name__, detail=_detail(exc))
            raise StateAway("the store of responses and conversations cannot be reached") from exc
        if self._is_away:
            self._is_away = False
            telemetry.log.info("state.back")

    async def _prepare(self) -> None:
        """Make the tables, unless they are there; once."""
        if self._is_prepared:
            return
        async with self._preparing:
            if self._is_prepared:
                return
            if self._is_sqlite:
                await asyncio.to_thread(_make_file, Path(str(self._url.database)), self._query_seconds * 0.8)
            await self._write_once(self._make_tables)
            self._is_prepared = True

    def _make_tables(self, connection: Connection) -> None:
        if not self._is_sqlite:  # SQLite's transaction is alone as it is
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"))
        METADATA.create_all(connection)
        version = connection.scalar(select(SCHEMA.c.version))
        if version is None:
            connection.execute(insert(SCHEMA).values(version=SCHEMA_VERSION))
        elif version != SCHEMA_VERSION:
            telemetry.log.error("state.schema.unknown", version=version, known=SCHEMA_VERSION)
            raise StateAway("the store of responses and conversations was written by another version")


@contextlib.asynccontextmanager
async def _connected(engine: Engine) -> AsyncIterator[Connection]:
    """Lend a connection. It is given back whole even when the caller is cancelled meanwhile; else it would be lost."""
    connection = await greenlet_spawn(engine.connect)
    try:
        yield connection
    finally:
        closing = asyncio.create_task(greenlet_spawn(connection.close))
        cancelled = None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as exc:
                cancelled = exc
        closing.result()
        if cancelled is not None:
            raise cancelled


def _transact(connection: Connection, work: Work[T]) -> T:
    with connection.begin():
        return work(connection)


def _open(url: URL, query_seconds: float) -> Engine:
    is_sqlite = url.get_backend_name() == "sqlite"
    connect: dict[str, Any] = (
        # A little less than the deadline, so that the driver's thread is free again when the caller is.
        {"timeout": query_seconds * 0.8}
        if is_sqlite
        else {"timeout": query_seconds, "server_settings": {"application_name": "fathom-recipe"}}
    )
    engine = create_engine(
        url,
        connect_args=connect,
        pool_size=POOL_CONNECTIONS,
        max_overflow=0 if is_sqlite else POOL_CONNECTIONS,
        pool_timeout=query_seconds,
        pool_pre_ping=not is_sqlite,  # a restarted server is noticed before a statement fails
        hide_parameters=True,  # they hold what people wrote, and errors are logged
    )
    if is_sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:  # the driver's own class
    connection.isolation_level = None  # BEGIN is ours: the driver's would come after the first reads
    cursor = connection.cursor()
    for pragma in ("synchronous=NORMAL", "foreign_keys=ON", "secure_delete=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    """Begin; a writer takes the lock at once, for one that has read before cannot wait for it."""
    statement = connection.get_execution_options().get("fathom_begin", "BEGIN")
    if statement:
        connection.exec_driver_sql(statement)


def _make_file(path: Path, seconds: float) -> None:
    """Make the file, readable by its owner alone (conversations are inside), with a journal that lets readers read on.

    The kind of journal is kept in the file. Replicas that set it at the same moment are refused at once, without the
    wait that other statements get (each holds what the other needs), so that the waiting is done here, for `seconds`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    until = time.monotonic() + seconds
    with contextlib.closing(sqlite3.connect(path, timeout=seconds, isolation_level=None)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as exc:
                if exc.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            else:
                return
            time.sleep(random.uniform(0.001, 0.02))  # noqa: S311 - spreads the contenders


def _detail(exc: BaseException) -> str:
    """Return the driver's words, without the statement."""
    return str(getattr(exc, "orig", None) or exc)[:200]
