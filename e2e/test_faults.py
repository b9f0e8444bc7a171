"""What still works while a part of the suite is down, and what comes back?"""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from e2e.client import complete, model_name
from e2e.suite import Suite
from services.kvstore.directory import segment_files
from services.kvstore.format import HEADER_BYTES
from services.kvstore.segments import load_segment
from services.local import state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]


SOON_SECONDS = 9.0
"""Two seconds are promised, and others may use the machine that runs the tests; a silent peer is given up after ten."""


@pytest.fixture
def suite(shared_suite):
    return shared_suite


@pytest_asyncio.fixture(loop_scope="session")
async def client(suite):
    async with httpx.AsyncClient(base_url=suite.base_url, timeout=60) as client:
        yield client


def fresh_ids(num_tokens: int) -> list[int]:
    return [100 + secrets.randbelow(40_000) for _ in range(num_tokens)]


async def until_served(client: httpx.AsyncClient, seconds: float = 60.0) -> None:
    """Wait until a one-token request succeeds again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await complete(client, fresh_ids(5), max_tokens=2)
        except (AssertionError, httpx.HTTPError, IndexError, KeyError):
            assert time.monotonic() < deadline, "the suite did not come back"
            await asyncio.sleep(0.3)
        else:
            return


async def lose(
    suite: Suite, client: httpx.AsyncClient, replica: str, body: dict[str, Any]
) -> tuple[int, list[str], float]:
    """Stream a request and kill the replica under it; return status, lines, and seconds from the kill to the end."""
    killed_at = 0.0

    async def kill() -> None:
        nonlocal killed_at
        await suite.kill(replica)
        killed_at = time.monotonic()

    async def kill_early() -> None:
        while not any(load.used_blocks or load.queued_sequences for load in await suite.prefill_loads()):  # noqa: ASYNC110 - asked
            await asyncio.sleep(0.02)
        await kill()

    # While the prompt is computed, however fast: the status line has not been sent yet.
    early = asyncio.create_task(kill_early()) if replica == "prefill-0" else None
    lines: list[str] = []
    async with asyncio.timeout(120), client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            lines += [line] if line else []
            if replica == "decode-0" and len(lines) == 3:
                await kill()
    if early is not None:
        await early
    return reply.status_code, lines, time.monotonic() - killed_at


@pytest.mark.alone
@pytest.mark.parametrize(("replica", "status"), [("prefill-0", 503), ("decode-0", 200)])
async def test_a_lost_replica_is_an_error_within_two_seconds(suite, client, replica, status):
    """Killed under a request: 503 before headers, an error event and no [DONE] after; then 503 at once; then it heals."""
    body = {
        "model": await model_name(client),
        "prompt": fresh_ids(2000 if replica == "prefill-0" else 300),
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": True,
    }
    got, lines, seconds = await lose(suite, client, replica, body)
    assert (status, True) == (got, seconds < SOON_SECONDS)
    assert '"error"' in lines[-1]
    assert "data: [DONE]" not in lines

    begun = time.monotonic()
    refused = await client.post("/v1/completions", json=body | {"stream": False, "max_tokens": 2, "prompt": [5]})
    assert 503 == refused.status_code
    assert int(refused.headers["retry-after"]) >= 1
    assert SOON_SECONDS > time.monotonic() - begun
    await until_served(client)


def records(suite: Suite) -> dict[bytes, tuple[Path, int]]:
    """Return the file and the middle of the payload of every block on the disk of the store, by block key."""
    folder = Path(suite.folder, ".fathom", "kv")
    return {
        found.key: (file.path, found.offset_bytes + HEADER_BYTES + found.stored_bytes // 2)
        for part in {path.parent for path in folder.rglob("*.seg")}
        for file in segment_files(part)
        for found in load_segment(file).locations
    }


async def new_records(suite: Suite, known: Container[bytes], at_least: int) -> dict[bytes, tuple[Path, int]]:
    """Wait for the asynchronous write-back; return what lies on the disk beside the known blocks."""
    new: dict[bytes, tuple[Path, int]] = {}
    give_up = time.monotonic() + 30
    while len(new) < at_least:
        assert time.monotonic() < give_up, f"the disk has {len(new)} new blocks, expected {at_least}"
        await asyncio.sleep(0.1)
        new = {key: place for key, place in records(suite).items() if key not in known}
    return new


async def settled_records(suite: Suite) -> dict[bytes, tuple[Path, int]]:
    """Return the blocks on disk once no earlier request's write-back adds to them any more."""
    before, after = records(suite), {}
    for _ in range(20):
        await asyncio.sleep(0.7)
        after = records(suite)
        if before.keys() == after.keys():
            break
        before = after
    return after


@pytest.fixture(scope="module")
def kept_ids():
    return fresh_ids(300)


@pytest.fixture(scope="module")
def damaged_ids():
    return fresh_ids(300)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stored(shared_suite, kept_ids, damaged_ids):
    """Answers to two prompts, and where the second one's blocks lie in which files; prefill and the store were started
    again, so that the blocks are in the store and in no pool.
    """
    async with httpx.AsyncClient(base_url=shared_suite.base_url, timeout=60) as client:
        known = await settled_records(shared_suite)
        kept = await complete(client, kept_ids, max_tokens=6)
        known |= await new_records(shared_suite, known, 2)
        damaged = await complete(client, damaged_ids, max_tokens=6)
        places = (await new_records(shared_suite, known, 2)).values()
        await asyncio.gather(shared_suite.restart("kvstore-0", signal.SIGKILL), shared_suite.restart("prefill-0"))
        await until_served(client)
    return kept, damaged, places


async def test_a_restarted_store_keeps_its_hits(suite, client, stored, kept_ids):
    """kvstore killed and started again: the second request is still served from it, with the same tokens."""
    cold, *_ = stored

    async def forget() -> None:
        await suite.restart("prefill-0")
        await until_served(client)

    warm = await suite.from_stores(lambda: complete(client, kept_ids, max_tokens=6), forget)

    assert (0, 256) == (cold.cached_tokens, warm.cached_tokens)
    assert cold.token_ids == warm.token_ids


async def test_a_damaged_block_is_a_miss_and_never_wrong_text(suite, client, stored, damaged_ids):
    """One flipped byte in the middle of a block: fewer cached tokens, the same answer."""
    _, cold, places = stored
    for path, offset in places:
        flip_byte(path, offset)

    again = await complete(client, damaged_ids, max_tokens=6)
    assert 0 == again.cached_tokens
    assert cold.token_ids == again.token_ids
    assert 0 < (await suite.kvstore_stats()).num_damaged


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x5A]))


async def test_nats_killed_and_restarted_under_load(suite, client):
    """Requests keep working from the last known replicas; the registry heals."""
    stop = asyncio.Event()
    failures: list[str] = []
    served = 0

    async def load() -> None:
        nonlocal served
        while not stop.is_set():
            try:
                await complete(client, fresh_ids(20), max_tokens=4)
                served += 1
            except (AssertionError, httpx.HTTPError) as error:
                failures.append(str(error)[:300])
            await asyncio.sleep(0.5)  # requests all the time, and a core for the suite beside this one

    workers = [asyncio.create_task(load()) for _ in range(3)]
    await asyncio.sleep(1)
    at_kill = served
    give_up = time.monotonic() + 6.5  # longer than the registry's TTL of 5 s
    while time.monotonic() < give_up:  # the launcher starts it again: keep it down, before anybody is heard through it
        with contextlib.suppress(AssertionError):
            await suite.kill("nats-0")
        await asyncio.sleep(0.02)
    stop.set()
    await asyncio.gather(*workers)

    assert [] == failures
    assert at_kill < served
    # The launcher restarts NATS; a replica that restarts now must be found through it.
    await suite.restart("decode-0")
    await until_served(client)


async def test_a_killed_supervisor_takes_everything_with_it(suite):
    """kill -9 leaves no orphan and no shared memory, and the console knows that nothing runs any more."""
    running, shared = suite.recorded().left_running(), suite.shared_memory("decode-0")
    assert shared.exists()
    suite.recorded().supervisor.send(signal.SIGKILL)

    assert [] == await asyncio.to_thread(state.wait_ended, running, 30)
    assert not shared.exists()
    assert 1 == (await suite.console("status")).returncode
    assert 0 == (await suite.console("down")).returncode
