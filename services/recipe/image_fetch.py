"""How does an image come from a URL that a caller wrote, without the caller reaching what only we can reach?

A name is looked up once and the connection goes to an address of that answer, all of which must be public: what a name
means later does not matter. TLS still proves the name. Redirects are new URLs and pass all of it again. Nothing of the
caller's request goes along, and nothing that came back is told but the image: to the caller all failures are one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from socket import SOCK_STREAM, getaddrinfo
from typing import Final

from services.chassis import telemetry
from services.recipe.addresses import is_public
from services.recipe.conversation import Conversation, Picture
from services.recipe.http_answer import Answer, BadAnswer
from services.recipe.image_urls import HostRule, Target, UrlRefused, read_target
from services.recipe.pictures import MAX_PICTURES_BYTES, too_large
from services.recipe.refusals import ApiError, refuse

FETCH_SECONDS = 10.0
"""For all images of a request together, redirects included."""
MAX_REDIRECTS = 3
MAX_ADDRESSES = 3
"""Of one name: as many are tried."""
MAX_FETCHES = 16
"""At once, of all requests."""
MAX_LOOKUPS = 8
"""At once: a lookup fills a thread for as long as the resolver likes."""
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
_READ_BYTES: Final = 64 << 10

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A host's addresses; OSError when it has none."""
Dial = Callable[[str, int, str], Awaitable[Stream]]
"""A TLS connection to (address, port), the peer proven to be the named host; OSError when there is none."""


class _Unfetched(Exception):  # noqa: N818 - becomes a 400
    """Why not: for our logs alone."""


@dataclass(slots=True)
class _Budget:
    """Bytes that a request's images may still have."""

    left: int


class ImageFetcher:
    """Fetches the pictures of conversations. rules: where from; none: URLs are refused."""

    def __init__(
        self,
        rules: tuple[HostRule, ...],
        *,
        resolve: Resolve | None = None,
        dial: Dial | None = None,
        seconds: float = FETCH_SECONDS,
    ) -> None:
        self._rules = rules
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="look up") if rules else None
        self._resolve = resolve or partial(_look_up, self._threads)
        self._dial = dial or partial(_connect, ssl.create_default_context() if rules else None)
        self._seconds = seconds
        self._places = asyncio.Semaphore(MAX_FETCHES)

    async def fetched(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the bytes of all its pictures; raise a 400 naming one that cannot be had."""
        wanted = {picture.url: picture for picture in reversed(conversation.pictures) if picture.url}
        if not wanted:
            return conversation
        for picture in wanted.values():
            self._target(picture.url, picture.where)  # all of them, before the first is asked for
        spent = sum(len(picture.encoded) // 4 * 3 for picture in conversation.pictures)
        budget = _Budget(MAX_PICTURES_BYTES - spent)
        async with asyncio.TaskGroup() as group:
            tasks = {url: group.create_task(self._one(picture, budget)) for url, picture in wanted.items()}
        found = {url: task.result() for url, task in tasks.items()}
        if (
            sum(len(found[picture.url]) for picture in conversation.pictures if picture.url)
            > MAX_PICTURES_BYTES - spent
        ):
            raise too_large()  # one image in several places counts as often

        def fill(part: str | Picture) -> str | Picture:
            return replace(part, data=found[part.url]) if isinstance(part, Picture) and part.url else part

        turns = (replace(turn, parts=tuple(map(fill, turn.parts))) for turn in conversation.turns)
        return replace(conversation, turns=tuple(turns))

    async def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _target(self, url: str, where: str) -> Target:
        if not self._rules:
            rule = "must be a data: URL with base64; this server fetches no URLs"
            raise refuse(where, rule, code="invalid_image_url")
        try:
            return read_target(url, self._rules)
        except UrlRefused as exc:
            raise refuse(where, str(exc), code="invalid_image_url") from None

    async def _one(self, picture: Picture, budget: _Budget) -> bytes:
        try:
            async with asyncio.timeout(self._seconds), self._places:
                return await self._follow(picture.url, budget)
        except TimeoutError:
            reason = "too slow"
        except (OSError, ssl.CertificateError) as exc:
            reason = type(exc).__name__
        except (_Unfetched, BadAnswer, UrlRefused) as exc:
            reason = str(exc)
        telemetry.log.info("recipe.image.unfetched", reason=reason)
        raise _cannot_fetch(picture.where)

    async def _follow(self, url: str, budget: _Budget) -> bytes:
        for _hop in range(1 + MAX_REDIRECTS):
            target = read_target(url, self._rules)
            answer = await self._ask(target, budget)
            if answer.status == HTTPStatus.OK:
                return bytes(answer.body)
            if answer.status not in _REDIRECTS or not answer.location:
                raise _Unfetched(f"status {answer.status}")
            url = target.redirected(answer.location)
        raise _Unfetched(f"more than {MAX_REDIRECTS} redirects")

    async def _ask(self, target: Target, budget: _Budget) -> Answer:
        reader, writer = await self._open(target)
        try:
            writer.write(_request(target))
            answer = Answer()
            while not answer.is_complete:
                data = await reader.read(_READ_BYTES)
                before = len(answer.body)
                answer.feed(data)
                budget.left -= len(answer.body) - before
                if budget.left < 0:
                    raise too_large()
            return answer
        finally:
            # Aborted, not closed: the other side has nothing more to say that we would wait for.
            writer.transport.abort()

    async def _open(self, target: Target) -> Stream:
        found = list(dict.fromkeys(await self._resolve(target.host, target.port)))
        if not found or not all(is_public(ip_address(address)) for address in found):
            raise _Unfetched("no public address")
        failed: OSError = OSError("no address")
        for address in found[:MAX_ADDRESSES]:
            try:
                return await self._dial(address, target.port, target.host)
            except OSError as exc:
                failed = exc
        raise failed


def _request(target: Target) -> bytes:
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {target.authority}",
        "Accept: image/png, image/jpeg, image/webp",
        "Accept-Encoding: identity",
        "User-Agent: fathom",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def _cannot_fetch(where: str) -> ApiError:
    return refuse(where, "the image could not be fetched", code="image_fetch_failed")


async def _look_up(threads: ThreadPoolExecutor | None, host: str, port: int) -> Sequence[str]:
    # The dot at the end: a name is what it says, whatever the resolver's search list would make of it.
    asked = partial(getaddrinfo, f"{host}.", port, type=SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(threads, asked)
    return [str(sockaddr[0]) for _family, _type, _protocol, _name, sockaddr in found]


async def _connect(context: ssl.SSLContext | None, address: str, port: int, host: str) -> Stream:
    assert context is not None, "without rules nothing is dialled"
    return await asyncio.open_connection(address, port, ssl=context, server_hostname=host)
