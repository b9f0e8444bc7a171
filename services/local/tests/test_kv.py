"""Does `fathom kv` show, check and clear stores, running or stopped, with the exit status that scripts look at?"""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.chassis.testing import running
from services.kvstore.config import KvstoreSettings
from services.kvstore.server import build
from services.kvstore.tests.blocks import FINGERPRINT, block, flip, key, open_store, segments
from services.local import kv

RUNNER = CliRunner()


def fill(folder: Path) -> None:
    async def write() -> None:
        store = await open_store(folder)
        await asyncio.gather(*(store.write(block(n, tenant="acme", retention=1)) for n in range(4)))
        await store.close()

    asyncio.run(write())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A store with four blocks that runs in a thread of its own: its folder and address."""
    folder = tmp_path / "kv"
    fill(folder)
    address: list[str] = []
    started, stopping = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running(KvstoreSettings(path=folder, drain_seconds=0), build) as service:
            address.append(service.address)
            started.set()
            await asyncio.to_thread(stopping.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(20)
    yield folder, address[0]
    stopping.set()
    thread.join(20)


def fathom(*arguments: str) -> tuple[int, str]:
    result = RUNNER.invoke(kv.app, list(arguments))
    return result.exit_code, result.output


def test_a_stopped_store_is_verified_and_damage_is_exit_3(tmp_path: Path) -> None:
    """The bad block is named by key, file and place."""
    fill(tmp_path)
    assert (0, f"{tmp_path}: 4 blocks read, 0 bad\n") == fathom("verify", "--path", str(tmp_path))
    path = segments(tmp_path)[0]
    flip(path, 2 * 12288 + 5000)
    code, shown = fathom("verify", "--path", str(tmp_path))
    assert 3 == code
    assert f"bad payload of block {key(2).hex()} in {path.name} at {2 * 12288}\n" in shown
    assert 1 == fathom("verify", "--path", str(tmp_path / "nothing"))[0]


@pytest.mark.slow
def test_a_running_store_is_shown_checked_and_cleared(served: tuple[Path, str]) -> None:
    """stats, pin, release, verify, evict, one after the other, by its address."""
    folder, address = served
    at = ("--address", address)
    code, shown = fathom("stats", *at)
    assert 0 == code
    assert "4 blocks in 1 segment;" in shown
    assert "tenant acme" in shown
    short = FINGERPRINT.hex()[: kv.SHORT_DIGITS]
    assert f"fingerprint {short}" in shown
    keys = [key(n).hex() for n in range(5)]
    pin = ("--fingerprint", FINGERPRINT.hex(), "--tenant", "acme", *at)
    for arguments, code, expected in (
        (
            ("pin", "s", *keys, *pin),
            1,
            f"fathom: nothing is pinned: its store does not have, or may not keep, {keys[4]}",
        ),
        (("pin", "s", *keys[:4], *pin), 0, "4 blocks pinned"),
        (("release", "s", "--tenant", "acme", "--key", keys[0], *at), 0, "released 1 block"),
        (("release", "s", "--tenant", "acme", *at), 0, "released 3 blocks"),
        (("verify", *at), 0, f"{address}: 4 blocks read, 0 bad"),
        (
            ("evict", "--fingerprint", "0" * kv.SHORT_DIGITS, *at),
            1,
            f"fathom: 0 stored fingerprints begin with {'0' * kv.SHORT_DIGITS}; give all 64 hex digits",
        ),
    ):
        # The service of this test logs to the same output.
        found, shown = fathom(*arguments)
        assert (code, expected) == (found, shown.splitlines()[-1])
    assert 1 == fathom("verify", "--remote", "1", *at)[0]
    assert 1 == fathom("verify", "--path", str(folder))[0]
    flip(segments(folder)[0], 5000)
    assert 3 == fathom("verify", *at)[0]
    code, shown = fathom("evict", "--tenant", "acme", "--fingerprint", short, *at)
    assert 0 == code
    assert f"{address}: removed 3 blocks" in shown
    assert [] == segments(folder)


def test_where_nothing_ran_there_is_nothing_to_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong directory is told in words, and is no success."""
    monkeypatch.chdir(tmp_path)
    assert (1, "fathom: nothing is stored here\n") == fathom("verify")


def test_wrong_words_are_refused_before_anything_is_asked() -> None:
    """Classes, keys, nothing or too much to remove, and nothing running here."""
    for words in ((), ("--all", "--tenant", "acme")):
        assert "--tenant, --anonymous, --fingerprint, --retention" in fathom("evict", *words)[1]
    assert 1 == fathom("evict", "--retention", "forever")[0]
    assert 1 == fathom("pin", "s", "abc", "--fingerprint", "00")[0]
    code, shown = fathom("stats", "--address", "127.0.0.1:1")
    assert 1 == code
    assert "fathom: " in shown
