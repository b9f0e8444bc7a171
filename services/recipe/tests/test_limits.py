"""Promises about bodies and connections that would cost more than they bring: refused before any work."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.recipe import limits_http
from services.recipe.limits import MAX_BRACKETS, MAX_CONTAINERS, MAX_DEPTH, check_json, check_unparsed
from services.recipe.refusals import ApiError
from services.recipe.tests.running import Running
from services.recipe.tests.scripted import Step, saying

IN_SESSION = pytest.mark.asyncio(loop_scope="session")

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def refusal(body: bytes) -> str:
    """What is wrong with a body that the parser takes; "" when nothing is."""
    try:
        check_json(body, orjson.loads(body))
    except ApiError as error:
        return f"{error.status} {error.code} {error.message}"
    return ""


class TestJson:
    @settings(max_examples=60, deadline=None)
    @given(st.dictionaries(st.text(max_size=3), JSON, max_size=4))
    def test_what_says_everything_once_passes(self, body: dict[str, Any]) -> None:
        """Whatever it says, and however it is spelled."""
        assert "" == refusal(orjson.dumps(body))
        assert "" == refusal(json.dumps(body, indent=1).encode())

    @pytest.mark.parametrize(
        "body",
        [
            b'{"a": 1, "a": 2}',
            b'{"a":1,"a":1}',
            b'{"x": [{"b": 1}, {"a": {"c": 1, "a": 2, "c": 3}}]}',
            b'{"a": 1, "\\u0061" : 2}',
            b'{"": 1, "": 2}',
            b'{"x": "{\\"a\\": 1}", "a": [{"a": ":", "a" :{}}]}',
        ],
    )
    def test_no_field_twice(self, body: bytes) -> None:
        """Not even spelled in another way, nor deep inside: which of the two counts must not be a question."""
        assert refusal(body).startswith("400 invalid_json the body has ")
        assert "twice" in refusal(body)

    def test_depth(self) -> None:
        """As deep as the limit, and not one more; lists and objects count alike, text does not."""

        def nested(levels: int) -> bytes:
            return b'{"a":[' * (levels // 2) + b"[]" * (levels % 2) + b"]}" * (levels // 2)

        assert ["", True] == [refusal(nested(MAX_DEPTH)), "levels" in refusal(nested(MAX_DEPTH + 1))]
        assert "" == refusal(orjson.dumps({"a": "[{" * 1000, "b": [[]] * 1000}))

    def test_number_of_objects(self) -> None:
        """Bounded; numbers are not."""
        assert "objects" in refusal(orjson.dumps({"m": [{}] * MAX_CONTAINERS}))
        assert "objects" in refusal(b'{"m": [' + b'{"a":1},' * MAX_CONTAINERS + b'1], "m": 1}')
        assert "" == refusal(orjson.dumps({"m": [{"a": 1}] * (MAX_CONTAINERS - 2)}))
        assert "" == refusal(orjson.dumps({"prompt": [1] * 100_000}))
        with pytest.raises(ApiError, match="brackets"):
            check_unparsed(b"[" * (MAX_BRACKETS + 1))

    @IN_SESSION
    async def test_it_is_asked_of_every_request(self, recipe: Running) -> None:
        """A 400 in the usual shape, on every path that takes a body."""
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"):
            answer = await recipe.http.post(path, content=b'{"model": "tiny", "model": "tiny"}')
            assert 400 == answer.status_code
            assert "twice" in answer.json()["error"]["message"]

    @IN_SESSION
    async def test_hostile_bodies_are_refused_at_once(self, recipe: Running) -> None:
        """5,000 brackets, 50 MB, millions of objects: a 4xx within a second, cases 54, 55 and 58."""
        recipe.play(saying([40]))
        deep = b'{"model": "tiny", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        many = orjson.dumps(CHAT | {"messages": [{}] * 2_000_000})
        for body, status in ((deep, 400), (b" " * (50 << 20), 413), (many, 400)):
            for is_last in (False, False, True):  # the best of three: other processes take their share
                began = time.monotonic()
                answer = await recipe.http.post("/v1/chat/completions", content=body)
                took = time.monotonic() - began
                assert status == answer.status_code
                assert len(answer.content) < 8192
                if took < 1:
                    break
                assert not is_last, took
        assert [] == recipe.entrypoint.submitted


@asynccontextmanager
async def connected(recipe: Running, *, limit: int = 1 << 16) -> AsyncIterator[tuple[Any, Any]]:
    """A bare connection, with little room for what is not read."""
    host, port = recipe.url.removeprefix("http://").split(":")
    bare = socket.socket()
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    bare.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=bare, limit=limit)
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()


class TestConnections:
    pytestmark = IN_SESSION

    @pytest.mark.parametrize(
        "head",
        [
            b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * (70 << 10) + b"\r\n\r\n",
            b"GET /health HTTP/1.1\r\nhost: x\r\nx-endless: " + b"a" * (200 << 10),
            b"GET /" + b"a" * (70 << 10) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(200)) + b"\r\n",
        ],
    )
    async def test_headers_are_bounded(self, recipe: Running, head: bytes) -> None:
        """431 in the usual shape, and the end of the connection; one header or many, ended or not."""
        async with connected(recipe) as (reader, writer):
            writer.write(head)
            answer = await reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")

        assert head.startswith(b"HTTP/1.1 431 ")
        assert "headers_too_large" == orjson.loads(body)["error"]["code"]

    @pytest.mark.parametrize("tail", [b"0\r\nx-endless: ", b"0\r\n", b"1;x="], ids=["trailer", "name", "chunk"])
    async def test_what_follows_a_body_is_bounded(self, recipe: Running, tail: bytes) -> None:
        """A line that never ends would fill memory, and take longer to read with every piece."""
        async with connected(recipe) as (_, writer):
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n" + tail)
            with pytest.raises(ConnectionError):
                for _ in range(100):
                    writer.write(b"x" * 65536)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                raise AssertionError("all of it was read")

    async def test_what_follows_a_body_is_no_header(self, recipe: Running) -> None:
        """Proxies that set our headers do not look there."""
        body = b"2\r\n{}\r\n0\r\nx-fathom-retention: nonsense\r\nx-request-id: mine\r\n\r\n"
        async with connected(recipe) as (reader, writer):
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + body)
            answer = await reader.readuntil(b"}}")

        assert b"retention" not in answer
        assert b"x-request-id: mine" not in answer

    @pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
    async def test_offers_of_other_protocols_are_passed_over(self, recipe: Running, protocol: bytes) -> None:
        """Bodies included, in whichever pieces they come: Java's client offers HTTP/2 with every request."""
        offer = b"connection: upgrade, http2-settings\r\nupgrade: " + protocol + b"\r\nhttp2-settings: AAA\r\n"
        body = b'{"prompt": "hi"}'
        whole = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + offer + b"content-length: %d\r\n\r\n" % len(body) + body
        chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        asked = [whole, b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + offer + chunked]
        asked.append(b"GET /health HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n")
        async with connected(recipe) as (reader, writer):
            for sent in ([b"".join(asked)], [part for one in asked for part in (one[:-9], one[-9:])]):
                for part in sent:
                    writer.write(part)
                    await asyncio.sleep(0.01)
                for _ in asked:
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200 ")
                    assert b"{" == (await reader.readuntil(b"}"))[:1]

    async def test_large_headers_that_fit_are_taken(self, recipe: Running) -> None:
        """And counted anew with each request of a connection."""
        for _ in range(3):
            answer = await recipe.http.get("/v1/models", headers={"x-large": "a" * (60 << 10)})
            assert 200 == answer.status_code

    @pytest.mark.parametrize(
        "sent", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"\x16\x03\x01\x02\x00"]
    )
    async def test_what_is_no_http_gets_json(self, recipe: Running, sent: bytes) -> None:
        """A 400 in the usual envelope, not a line of text."""
        async with connected(recipe) as (reader, writer):
            writer.write(sent)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")

        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/json" in head
        assert "invalid_http" == orjson.loads(body)["error"]["code"]

    async def test_half_a_request_does_not_stay(self, recipe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """A connection whose first request never comes is closed, and so is one whose next one never ends."""
        monkeypatch.setattr(limits_http, "HEAD_SECONDS", 0.3)
        async with connected(recipe) as (reader, writer):
            assert b"" == await reader.read()
        async with connected(recipe) as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost:")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")

    async def test_a_long_answer_is_not_a_late_request(self, recipe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """Half of the next request may already be there: the answer goes on to its end."""
        monkeypatch.setattr(limits_http, "HEAD_SECONDS", 0.1)
        recipe.play(saying([40] * 10, eos=2, after=0.04))
        body = orjson.dumps(CHAT)
        async with connected(recipe) as (reader, writer):
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            writer.write(b"GET / HTTP/1.1\r\nhost:")
            told = await reader.read()

        assert told.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason"' in told

    async def test_whoever_stops_reading_is_cut_off(self, recipe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """The request is cancelled in the engines; what was not read is let go."""
        monkeypatch.setattr(limits_http, "SLOW_SECONDS", 0.2)

        def endless(_request: Any) -> Any:
            while True:
                yield Step([40] * 20_000, after=0.001)

        recipe.play(endless)
        body = orjson.dumps(CHAT | {"stream": True, "return_token_ids": True})
        async with connected(recipe, limit=1024) as (reader, writer):
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            await reader.read(100)
            await recipe.until(lambda: bool(recipe.entrypoint.cancelled), seconds=30)

        assert "disconnect" == recipe.entrypoint.cancelled[0][1]

    async def test_slow_readers_who_read_are_not(self, recipe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """Time counts from when the buffer is full to when it was read, not for the whole answer."""
        monkeypatch.setattr(limits_http, "SLOW_SECONDS", 0.8)
        recipe.play(saying([40] * 100_000, per_step=1000, eos=2))
        recipe.entrypoint.models[0].context_tokens = 512
        body = orjson.dumps({"model": "tiny", "prompt": "hi", "stream": True, "return_token_ids": True})
        async with connected(recipe, limit=1024) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            told = b""
            while b"[DONE]" not in told[-100:] and (part := await reader.read(1 << 14)):
                told += part
                await asyncio.sleep(0.005)

        assert b"[DONE]" in told[-100:]
        assert [] == recipe.entrypoint.cancelled
