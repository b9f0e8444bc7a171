"""Is the console's page for people at this machine, and for nobody else's page?"""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from services.local.console.web import HTML, Reply, Request, WebServer, read_head, refusal


def head(first: str = "GET / HTTP/1.1", *headers: str) -> bytes:
    return "\r\n".join([first, *headers, "", ""]).encode("latin-1")


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost", "LOCALHOST:9", "[::1]:80", "127.0.0.1"])
def test_people_at_this_machine_are_served(host: str) -> None:
    """Through a tunnel's port, too."""
    assert refusal(read_head(head("GET /requests/a%2Fb?live HTTP/1.1", f"Host: {host}"))) is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Host: evil.example"],
        ["Host: 127.0.0.1.evil.example:8"],
        ["Host: localhost", "Host: evil.example"],
        ["Host:"],
    ],
    ids=["none", "other", "longer", "two", "empty"],
)
def test_another_name_that_points_here_is_refused(headers: list[str]) -> None:
    """DNS rebinding: a page elsewhere asks us under its own name, and would be allowed to read the answer."""
    reply = refusal(read_head(head("GET / HTTP/1.1", *headers)))

    assert reply is not None
    assert HTTPStatus.MISDIRECTED_REQUEST == reply.status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "get"])
def test_nothing_can_be_changed(method: str) -> None:
    """GET and HEAD only."""
    reply = refusal(read_head(head(f"{method} / HTTP/1.1", "Host: localhost")))

    assert reply is not None
    assert HTTPStatus.METHOD_NOT_ALLOWED == reply.status


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200), st.text(max_size=80).map(lambda text: f"GET /{text} HTTP/1.1\r\nHost: a".encode())
    )
)
def test_any_bytes_are_a_request_or_none(noise: bytes) -> None:
    """Nothing is ever raised."""
    refusal(read_head(noise))


@pytest_asyncio.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    async def answer(request: Request) -> Reply:
        return Reply(HTTPStatus.OK, HTML, f"{request.path} {dict(request.query)}".encode())

    server = WebServer(answer)
    yield "127.0.0.1", await server.start("127.0.0.1:0")
    await server.stop()


async def exchange(address: tuple[str, int], sent: bytes) -> tuple[str, str]:
    """Return head and body of the reply."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    async with asyncio.timeout(30):
        reply = await reader.read()
    writer.close()
    said, _, body = reply.decode().partition("\r\n\r\n")
    return said, body


async def test_a_page_comes_with_orders_to_load_nothing(address) -> None:
    """No script, no frame around us, nothing kept, nothing read by other origins."""
    said, body = await exchange(address, head("GET /a%20b?live&c=d HTTP/1.1", "Host: localhost"))

    assert said.startswith("HTTP/1.1 200 OK\r\n")
    assert "Content-Security-Policy: default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors" in said
    for order in ("X-Content-Type-Options: nosniff", "Cache-Control: no-store", "Resource-Policy: same-origin"):
        assert order in said
    assert "Access-Control" not in said
    assert "/a b {'live': '', 'c': 'd'}" == body


async def test_head_gets_no_body_and_noise_a_refusal(address) -> None:
    """The connection ends after one reply in any case."""
    said, body = await exchange(address, head("HEAD / HTTP/1.1", "Host: localhost"))
    assert ("200", "") == (said.split()[1], body)
    assert "400" == (await exchange(address, b"\x16\x03\x01 hello\r\n\r\n"))[0].split()[1]
    assert ("", "") == await exchange(address, b"GET /" + b"x" * 20_000)
