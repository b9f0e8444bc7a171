"""Does a response leave in as few pieces as it can, and whole all the same?"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.recipe.cork import Cork
from services.recipe.tests.running import Running
from services.recipe.tests.scripted import saying

CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": %s}'


class Pieces(asyncio.Transport):
    """A transport that keeps what it is given, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def write_eof(self) -> None:
        self.pieces.append(b"eof")

    def close(self) -> None:
        self.pieces.append(b"closed")

    def is_closing(self) -> bool:
        return b"closed" in self.pieces


async def written(steps: Callable[[Cork], None] | Callable[[Cork], Awaitable[None]]) -> list[bytes]:
    """What leaves when this is done to a cork, and the loop has turned."""
    transport = Pieces()
    cork = Cork(transport, asyncio.get_running_loop())
    cork.expect_head()
    if (pending := steps(cork)) is not None:
        await pending
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return transport.pieces


async def test_a_head_waits_for_its_body() -> None:
    """What comes later goes at once."""

    def steps(cork: Cork) -> None:
        for part in (b"head", b"body", b"more"):
            cork.write(part)

    assert [b"headbody", b"more"] == await written(steps)


async def test_a_request_that_came_early_costs_nothing() -> None:
    """Its head was read between another answer's head and body."""

    def steps(cork: Cork) -> None:
        cork.write(b"head")
        cork.expect_head()
        cork.write(b"body")

    assert [b"headbody"] == await written(steps)


@pytest.mark.parametrize("end", ["write_eof", "close"])
async def test_a_head_alone_leaves_too(end: str) -> None:
    """At the end of the turn, or with the connection."""

    def steps(cork: Cork) -> None:
        cork.write(b"head")
        getattr(cork, end)()
        assert (end == "close") == cork.is_closing()

    assert [b"head"] == await written(lambda cork: cork.write(b"head"))
    assert [b"head", {"write_eof": b"eof", "close": b"closed"}[end]] == await written(steps)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("flag", "last"), [(b"false", b'"service_tier":"default"}'), (b"true", b"data: [DONE]\n\n\r\n0\r\n\r\n")]
)
async def test_responses_follow_each_other_on_one_connection(recipe: Running, flag: bytes, last: bytes) -> None:
    """Head and body in order, twice."""
    recipe.play(saying([40, 41], per_step=9, eos=2))
    host, port = recipe.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = CHAT % flag
    try:
        for _ in range(2):
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            async with asyncio.timeout(20):
                answer = await reader.readuntil(last)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert 1 == answer.count(b"HTTP/1.1")
    finally:
        writer.close()
