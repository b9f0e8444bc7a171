"""What do the tests of the response store stand on? A private PostgreSQL, and small responses."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Update, make_url, update

from services.recipe.response_state import Item, Status, StoredEvent, StoredResponse
from services.recipe.response_store import ResponseStore
from services.recipe.response_store_tables import CONVERSATIONS, RESPONSES

DEBIAN_BINARIES = Path("/usr/lib/postgresql")
_SECONDS = 60


def find_postgresql() -> Path | None:
    """Return the folder with initdb and pg_ctl, Debian's newest or the PATH's; None where there is none."""
    folders = sorted(DEBIAN_BINARIES.glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    on_path = shutil.which("pg_ctl")
    if on_path:
        folders.append(Path(on_path).resolve().parent)
    return next((path for path in folders if (path / "initdb").exists() and (path / "pg_ctl").exists()), None)


@contextmanager
def private_postgresql() -> Iterator[str]:
    """Run a server of our own, on a Unix socket alone; yield its state URL. Skips, and says why, without binaries."""
    binaries = find_postgresql()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed here: apt-get install postgresql")
    # Short, because a socket's path is; readable by the server's user, which pytest's own folders are not.
    folder = Path(tempfile.mkdtemp(prefix="fathom-pg-"))
    as_user = _as_server_user(folder)
    quick = "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c shared_buffers=16MB"
    options = f"-k {folder} -c listen_addresses='' -c deadlock_timeout=100ms {quick}"
    data, log = str(folder / "data"), str(folder / "log")
    try:
        _call(*as_user, str(binaries / "initdb"), "-D", data, "-A", "trust", "-U", "fathom", "-N", "-E", "UTF8")
        _call(*as_user, str(binaries / "pg_ctl"), "-D", data, "-l", log, "-w", "-o", options, "start")
        try:
            yield f"postgresql://fathom@/postgres?host={folder}"
        finally:
            _call(*as_user, str(binaries / "pg_ctl"), "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_server_user(folder: Path) -> tuple[str, ...]:
    """Return what a command starts with to run as somebody PostgreSQL accepts: it refuses root."""
    if os.geteuid() != 0:
        return ()
    user = "nobody"
    shutil.chown(folder, user)
    group = subprocess.run(["id", "-g", user], capture_output=True, text=True, check=True).stdout.strip()
    return ("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups")


def _call(*command: str) -> None:
    # Not captured by pipes: the server would inherit them, and waiting for their end would be for ever.
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(command, stdout=said, stderr=said, cwd="/", timeout=_SECONDS, check=False)
        said.seek(0)
        assert 0 == done.returncode, said.read().decode()


def empty_database(server_url: str) -> str:
    """Empty the server's database, which is faster than to make another; return its state URL."""
    binaries = find_postgresql()
    assert binaries is not None
    login = ("-h", str(make_url(server_url).query["host"]), "-U", "fathom", "-d", "postgres")
    _call(str(binaries / "psql"), *login, "-q", "-c", "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return server_url


def message(item_id: str, content: str = "hello", role: str = "user") -> Item:
    """Return a message item."""
    return {"id": item_id, "type": "message", "role": role, "content": content}


def response(
    name: str = "resp_1", *, tenant: str = "acme", status: Status = "completed", **other: Any
) -> StoredResponse:
    """Return a small response."""
    body = {"id": name, "object": "response", "status": status, "output": [message(f"msg_{name}", "hi", "assistant")]}
    values: dict[str, Any] = {"input_items": [message(f"in_{name}")], "body": body, "created_at": 1.5}
    return StoredResponse(id=name, tenant=tenant, status=status, **(values | other))


async def age(store: ResponseStore, seconds: float) -> None:
    """Let time pass for what is stored."""
    older: list[Update] = [
        update(RESPONSES).values(expires_at=RESPONSES.c.expires_at - seconds, heard_at=RESPONSES.c.heard_at - seconds),
        update(CONVERSATIONS).values(expires_at=CONVERSATIONS.c.expires_at - seconds),
    ]

    def work(connection: Connection) -> None:
        for change in older:
            connection.execute(change)

    await store._link.write(work)


def work_as_owner(state_url: str, num_events: int) -> None:
    """Generate the background response `resp_1` as a replica of its own would; the entry of another process."""
    asyncio.run(_generate(state_url, num_events))


async def _generate(state_url: str, num_events: int) -> None:
    store = ResponseStore(state_url, query_seconds=30)
    stored = response(status="in_progress", owner="boot-of-another", keeps_events=True)
    await store.add(stored)
    status: Status = "completed"
    for first in range(0, num_events, 3):
        if await store.beat(stored.owner, [stored.id]):
            status = "cancelled"
            break
        batch = [StoredEvent(number, b"{}") for number in range(first, min(first + 3, num_events))]
        await store.add_events(stored.tenant, stored.id, batch)
        await asyncio.sleep(0.02)
    assert await store.finish(stored.tenant, stored.id, status, {**stored.body, "status": status})
    await store.close()
