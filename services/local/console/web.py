"""How is a page served on loopback, to people at this machine and to nobody else's page?

Like the services' /metrics: GET, one reply, close. No framework, for there is little to serve.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote, urlsplit

from services.chassis.one_reply import OneReplyServer

MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 16 << 10
# Any port: it may be a tunnel's. A page elsewhere whose name was made to point here (DNS rebinding) has another name.
OUR_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
HTML = "text/html; charset=utf-8"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_ALWAYS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NOTHING_LOADS = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back."""

    status: HTTPStatus
    content_type: str
    body: bytes
    policy: str = NOTHING_LOADS
    """Content-Security-Policy."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a browser asked for."""

    method: str
    path: str
    """Percent signs resolved."""
    query: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    """Every Host header."""


Answer = Callable[[Request], Awaitable[Reply]]


def read_head(head: bytes) -> Request | None:
    """Return what a request's head says; None when it is none."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.partition(" ")
    if not (version.startswith("HTTP/1.") and target.startswith("/")):
        return None
    try:
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=16))
    except ValueError:
        return None
    headers = [line.partition(":") for line in lines]
    hosts = tuple(value.strip().lower() for name, _, value in headers if name.lower() == "host")
    return Request(method, unquote(parts.path), query, hosts)


def refusal(request: Request | None) -> Reply | None:
    """Return why a request gets no page, None when it may have one."""
    if request is None:
        return _NO_HTTP
    if len(request.hosts) != 1 or _name_of(request.hosts[0]) not in OUR_NAMES:
        return plain(HTTPStatus.MISDIRECTED_REQUEST, "ask for 127.0.0.1 or localhost")
    if request.method not in {"GET", "HEAD"}:
        return plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
    return None


def plain(status: HTTPStatus, text: str) -> Reply:
    """Return a reply of one line."""
    return Reply(status, TEXT, text.encode() + b"\n")


_NO_HTTP = plain(HTTPStatus.BAD_REQUEST, "this is no HTTP request")


def encode(reply: Reply, *, is_head_only: bool = False) -> bytes:
    """Return the reply as it goes over the wire."""
    headers = {
        "Content-Type": reply.content_type,
        "Content-Length": str(len(reply.body)),
        "Content-Security-Policy": reply.policy,
        **_ALWAYS,
    }
    if reply.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = "GET, HEAD"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\n{lines}\r\n".encode("latin-1")
    return head if is_head_only else head + reply.body


class WebServer:
    """Hands requests to `answer`, those that may have one."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        busy = encode(plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"))
        self._server = OneReplyServer(
            self._reply, busy=busy, max_connections=MAX_CONNECTIONS, max_head_bytes=MAX_HEAD_BYTES
        )

    async def start(self, address: str) -> int:
        """Listen on host:port, 0 for a free one; return the port. Raises OSError when it is taken."""
        host, _, port = address.rpartition(":")
        return await self._server.start(host, int(port))

    async def stop(self) -> None:
        """Close the listening socket."""
        await self._server.stop()

    async def _reply(self, head: bytes) -> bytes:
        request = read_head(head)
        if request is None:
            return encode(_NO_HTTP)
        reply = refusal(request) or await self._answer(request)
        return encode(reply, is_head_only=request.method == "HEAD")


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
