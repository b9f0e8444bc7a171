"""Do objects come back as they were put, and does a store that misbehaves cost only what it may?"""

import asyncio
import json
import time
from pathlib import Path

import pytest

from services.kvstore.blobs import (
    BlobBackend,
    BlobError,
    BlobMissingError,
    BlobOptions,
    load_options,
    open_blobs,
)
from services.kvstore.tests.objects import FAST, gate


@pytest.fixture(params=["file", "memory"])
def blobs(request, tmp_path) -> BlobBackend:
    return open_blobs("memory://" if request.param == "memory" else f"file://{tmp_path}/mount/kv", FAST)


async def pieces(*some: bytes):
    for piece in some:
        yield piece


def s3(port: int, **options) -> BlobBackend:
    known = {
        "endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a", "secret_access_key": "b", "read_seconds": 0.1,
        "slow_seconds": 0.05, "open_seconds": 0.2, "write_seconds": 2.0, "connect_seconds": 0.2,
    }  # fmt: skip
    return open_blobs("s3://bucket/prefix", BlobOptions.model_validate(known | options))


async def test_an_object_is_created_once(blobs):
    """Whoever comes second is told so and changes nothing."""
    assert await blobs.put_if_absent("a/b", b"first")
    assert not await blobs.put_if_absent("a/b", b"second")

    assert b"first" == await blobs.get("a/b", max_bytes=100)


async def test_ranges_are_exact_or_missing(blobs):
    """Neither an absent object nor a short one gives bytes."""
    await blobs.put_stream("seg/x", pieces(b"0123", b"456", b"789"), 10)

    assert b"3456" == bytes(await blobs.get_range("seg/x", 3, 4))
    for path, start, length in (("seg/x", 8, 3), ("seg/y", 0, 1)):
        with pytest.raises(BlobMissingError):
            await blobs.get_range(path, start, length)
    with pytest.raises(BlobMissingError):
        await blobs.get("seg/y", max_bytes=100)


async def test_sizes_are_bounded(blobs):
    """An object longer than promised is not read, nor are ranges or objects beyond the limits."""
    await blobs.put_if_absent("a", b"0123456789")

    with pytest.raises(BlobError, match="10 bytes"):
        await blobs.get("a", max_bytes=9)
    with pytest.raises(ValueError, match="at most"):
        await blobs.get_range("a", 0, 1 << 30)
    with pytest.raises(ValueError, match="at most"):
        await blobs.put_if_absent("b", bytes((32 << 20) + 1))


async def test_deleting_is_done_once_or_twice(blobs):
    """What is gone already is gone."""
    await blobs.put_if_absent("a/b", b"x")
    for _ in range(2):
        await blobs.delete("a/b")

    assert [] == await blobs.list("a", max_blobs=10)


async def test_listings_start_and_end_where_asked(blobs):
    """By prefix of whole path parts, behind a place, up to a number."""
    for path in ("m/agent/1/a", "m/agent/2/b", "m/agent/2/c", "m/agents/3/d", "n/e"):
        await blobs.put_if_absent(path, b"x")

    async def paths(prefix, **limits):
        return sorted(one.path for one in await blobs.list(prefix, **{"max_blobs": 10, **limits}))

    assert ["m/agent/1/a", "m/agent/2/b", "m/agent/2/c"] == await paths("m/agent/")
    assert ["m/agent/2/b", "m/agent/2/c"] == await paths("m/agent/", after="m/agent/2")
    assert [] == await paths("nothing")
    assert 2 == len(await paths("m", max_blobs=2))


async def test_a_stream_that_breaks_leaves_no_object(blobs):
    """An upload is whole or not at all, and what broke it is told."""

    async def broken():
        yield b"x" * 1000
        raise BlobMissingError("source is gone")

    with pytest.raises(BlobError):
        await blobs.put_stream("seg/x", broken(), 2000)

    assert [] == await blobs.list("seg", max_blobs=10)
    assert not blobs.is_away


@pytest.mark.parametrize("url", ["", "s3://", "kv", "file://", "file://host/path", "memory://x", "http://host/bucket"])
def test_other_urls_are_refused(url):
    """At the start, with the three that are allowed."""
    with pytest.raises(ValueError, match="s3://BUCKET/PREFIX"):
        open_blobs(url, FAST)


def test_options_come_from_a_file(tmp_path: Path):
    """Credentials are mounted, not passed in the environment; no file means the defaults."""
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"endpoint": "http://127.0.0.1:9", "secret_access_key": "s", "read_seconds": 1}))

    assert "s" == load_options(file).secret_access_key.get_secret_value()
    assert BlobOptions() == load_options(None)


@pytest.mark.parametrize("text", ['{"secret_access_key": ["hidden"]}', '{"hidden_key": 1, "endpoint": "x"}', "{hidden"])
def test_a_bad_options_file_is_refused_without_its_secrets(tmp_path: Path, text):
    """The reason names file and field; values stay out of the log."""
    file = tmp_path / "options.json"
    file.write_text(text)

    with pytest.raises(ValueError, match=r"options\.json") as refused:
        load_options(file)
    assert "hidden'" not in str(refused.value)


@pytest.mark.parametrize("mode", ["503", "hang", "down"])
async def test_a_store_that_fails_is_left_alone_and_tried_again(mode):
    """After three bad calls the next ones cost nothing; once it answers, it is in use again by itself."""
    async with gate(1) as there:
        there.become(mode)
        blobs = s3(there.port, open_seconds=1.5)  # long enough for a hundred calls on a machine that others use
        began = time.monotonic()
        for _ in range(3):
            with pytest.raises(BlobError):
                await blobs.get_range("x", 0, 1)
        assert time.monotonic() - began < 20
        assert blobs.is_away

        began, calls = time.monotonic(), there.num_connections
        for _ in range(100):
            with pytest.raises(BlobError, match="left alone"):
                await blobs.get_range("x", 0, 1)
        assert time.monotonic() - began < 1.5
        assert calls == there.num_connections

    async def not_found(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(not_found, "127.0.0.1", there.port):
        give_up = time.monotonic() + 30
        while blobs.is_away:  # a tenth of a second may be too short for a trial
            assert time.monotonic() < give_up
            await asyncio.sleep(blobs.seconds_to_trial)
            with pytest.raises(BlobError):
                await blobs.get_range("x", 0, 1)
        with pytest.raises(BlobMissingError):
            await s3(there.port, read_seconds=20).get_range("x", 0, 1)


async def test_callers_who_leave_say_nothing_of_the_store():
    """A client that hangs up early is no failure of the object store."""
    async with gate(1) as there:
        there.become("hang")
        blobs = s3(there.port, read_seconds=20, slow_seconds=20)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await blobs.get_range("x", 0, 1)

        assert not blobs.is_away
