"""Promises about images from URLs: they come from public servers alone, bounded, and failures tell nothing."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from proto.common_pb2 import ModelCard
from services.recipe.config import RecipeSettings
from services.recipe.conversation import Conversation, Picture, Turn
from services.recipe.http_answer import Answer, BadAnswer
from services.recipe.image_fetch import MAX_REDIRECTS, ImageFetcher, _connect, _look_up
from services.recipe.image_urls import read_rules
from services.recipe.pictures import MAX_PICTURES_BYTES
from services.recipe.refusals import ApiError, as_api_error
from services.recipe.tests.deepseek import data_url, png, write_folder
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.speaking import answering
from services.recipe.tests.web import HOST, OTHER, PRIVATE, PUBLIC, Web, contexts, moved, ok, serving_web

URL = f"https://{HOST}/a.png"
PICTURE = png(40, 30)


@pytest_asyncio.fixture
async def web() -> AsyncIterator[Web]:
    """A web server with one picture."""
    async with serving_web() as running:
        running.pages["/a.png"] = ok(PICTURE, "Content-Type: text/html")
        yield running


def fetcher_of(web: Web, rules: str = "*", seconds: float = 5.0) -> ImageFetcher:
    return ImageFetcher(read_rules(rules), resolve=web.resolve, dial=web.dial, seconds=seconds)


async def fetch(web: Web, *urls: str, **options: Any) -> list[bytes]:
    """The bytes of pictures, fetched together."""
    turn = Turn("user", tuple(Picture(f"messages[0].content[{at}]", "", url=url) for at, url in enumerate(urls)))
    fetched = await fetcher_of(web, **options).fetched(Conversation((turn,)))
    return [picture.data for picture in fetched.pictures]


async def refusal(web: Web, *urls: str, **options: Any) -> ApiError:
    """The error that a fetch ends with."""
    with pytest.raises((ApiError, BaseExceptionGroup)) as caught:
        await fetch(web, *urls, **options)
    return as_api_error(caught.value)


async def test_an_image_is_fetched(web: Web) -> None:
    """By its own first bytes, whatever it is called; nothing of ours goes along but what HTTP needs."""
    assert [PICTURE, PICTURE] == await fetch(web, URL, URL)
    assert [(PUBLIC, 443, HOST)] == web.dialled
    headers = web.asked[0].split("\r\n")
    assert "GET /a.png HTTP/1.1" == headers[0]
    assert {"Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"} == {
        line.split(":")[0] for line in headers[1:] if line
    }
    assert f"Host: {HOST}" in headers


async def test_chunked_and_unbounded_bodies_are_read(web: Web) -> None:
    """And an early answer before the true one is passed over."""
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (PICTURE[:20], PICTURE[20:])]
    web.pages["/chunked"] = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"]
    web.pages["/open"] = [b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + PICTURE[:9], PICTURE[9:]]

    assert [PICTURE] * 2 == await fetch(web, f"https://{HOST}/chunked", f"https://{HOST}/open")


async def test_a_name_is_looked_up_once(web: Web) -> None:
    """Rebinding: what the name means afterwards does not matter, since the connection goes to the checked address."""
    web.names[HOST] = [[PUBLIC], [PRIVATE]]

    assert [PICTURE] == await fetch(web, URL)
    assert ([HOST], [(PUBLIC, 443, HOST)]) == (web.lookups, web.dialled)
    assert "image_fetch_failed" == (await refusal(web, URL)).code
    assert 1 == len(web.dialled)


@pytest.mark.parametrize(
    "addresses",
    [
        [PRIVATE],
        [PUBLIC, PRIVATE],
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:10.0.0.1"],
        ["fd00:ec2::254"],
        [],
    ],
    ids=str,
)
async def test_what_is_not_public_is_never_dialled(web: Web, addresses: list[str]) -> None:
    """Not even where another address of the same name is."""
    web.names[HOST] = [addresses]
    error = await refusal(web, URL)

    assert (400, "messages[0].content[0]", []) == (error.status, error.param, web.dialled)


async def test_the_next_address_is_tried(web: Web) -> None:
    """Names have several, and some are out of reach."""
    web.names[HOST] = [["2606:4700:4700::1111", PUBLIC]]
    web.dead = {"2606:4700:4700::1111"}

    assert [PICTURE] == await fetch(web, URL)


async def test_redirects_are_followed_and_checked(web: Web) -> None:
    """Every hop is a new URL: by rule, by name and by address."""
    web.pages |= {
        "/relative": moved("/a.png", 307),
        "/other": moved(f"https://{OTHER}/a.png"),
        "/private": moved("https://internal.example.com/secret"),
        "/plain": moved(f"http://{HOST}/a.png"),
        "/address": moved("https://169.254.169.254/latest/meta-data"),
        "/file": moved("file:///etc/passwd"),
        "/port": moved(f"https://{HOST}:22/"),
        "/user": moved(f"https://a:b@{HOST}/a.png"),
        "/loop": moved("/loop"),
        "/odd": moved("https://a.example.com]/"),
        "/nowhere": b"HTTP/1.1 302 Moved\r\nContent-Length: 0\r\n\r\n",
    }
    web.names["internal.example.com"] = [[PRIVATE]]

    assert [PICTURE] * 2 == await fetch(web, f"https://{HOST}/relative", f"https://{HOST}/other")
    messages = set()
    for path in ("private", "plain", "address", "file", "port", "user", "loop", "odd", "nowhere", "missing"):
        before = len(web.dialled)
        messages.add((await refusal(web, f"https://{HOST}/{path}")).message)
        assert len(web.dialled) - before == (1 + MAX_REDIRECTS if path == "loop" else 1)
    assert {address for address, _port, _host in web.dialled} == {PUBLIC}
    assert 1 == len(messages), "failures cannot be told apart from outside"


@pytest.mark.parametrize(
    "page",
    [
        ok(PICTURE, "Content-Encoding: gzip"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 40_000 + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nxxxx",
        b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n" + ok(PICTURE),
        ok(PICTURE[:20]) + ok(PICTURE[20:]),
    ],
    ids=["packed", "cut", "headers", "other", "nothing", "upgrade", "later", "twice"],
)
async def test_answers_that_are_none_are_a_400(web: Web, page: bytes) -> None:
    """Nothing is unpacked, nothing is waited for."""
    web.pages["/a.png"] = page

    assert "image_fetch_failed" == (await refusal(web, URL, seconds=2)).code


@pytest.mark.parametrize("tail", [b"1;x=", b"0\r\nX: ", b"0\r\n"], ids=["chunk", "trailer", "trailer name"])
def test_what_is_no_body_is_bounded(tail: bytes) -> None:
    """A line after a chunk that never ends fills no memory, and no time."""
    answer = Answer()
    answer.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n" + tail)
    with pytest.raises(BadAnswer):
        for _ in range(3):
            answer.feed(b"x" * 65536)


async def test_size_and_time_are_bounded(web: Web) -> None:
    """An answer without an end is cut off at the limit, a slow one at the time; all images of a request share both."""
    endless = [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * (1 << 20)] * 8]
    web.pages["/endless"] = endless
    web.pages["/slow"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", *[b"x"] * 200]
    web.pages["/half"] = web.pages["/half?2"] = ok(b"x" * (MAX_PICTURES_BYTES // 2 + 1))
    half = f"https://{HOST}/half"

    assert 413 == (await refusal(web, f"https://{HOST}/endless")).status
    assert 413 == (await refusal(web, half, half)).status
    assert 413 == (await refusal(web, half, f"{half}?2")).status
    async with asyncio.timeout(20):
        assert "image_fetch_failed" == (await refusal(web, f"https://{HOST}/slow", seconds=0.3)).code


async def test_the_name_must_be_proven(web: Web) -> None:
    """A certificate for another name is no image."""
    web.names["evil.example.com"] = [[PUBLIC]]

    assert "image_fetch_failed" == (await refusal(web, "https://evil.example.com/a.png")).code
    assert not web.asked


async def test_the_system_s_own_lookups_and_connections(web: Web) -> None:
    """What the tests replace elsewhere: names are looked up in a thread, and TLS goes to the address for the name."""
    with ThreadPoolExecutor(1) as threads:
        try:
            found = await _look_up(threads, "localhost", 443)
        except OSError:
            found = []  # it is in the hosts file alone, and names of that are not asked for
    reader, writer = await _connect(contexts()[1], "127.0.0.1", web.port, HOST)
    writer.write(b"GET /a.png HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    writer.transport.abort()
    with pytest.raises(ssl.SSLCertVerificationError):
        await _connect(contexts()[1], "127.0.0.1", web.port, "other.example.org")

    assert set(found) <= {"127.0.0.1", "::1"}
    assert answer.endswith(PICTURE)


@pytest.mark.parametrize(
    "url",
    [
        f"http://{HOST}/", "https://", "https:///x", f"https://user@{HOST}/", f"https://{HOST}:22/", f"https://{HOST}:0/",
        f"https://{HOST}:99999/", f"https://{HOST}:x/", "https://localhost/", "https://127.0.0.1/", "https://[::1]/",
        "https://2130706433/", "https://0x7f.1/", "https://0x7f.0.0.0x1/", "https://127.1/", "https://a..example.com/",
        "https://example.com./", f"https://{HOST}\\@evil.com/", f"https://{HOST}/ a", f"https://{HOST}/\r\nX: y",
        "https://exаmple.com/", "https://-a.example.com/", "https://a_b.example.com/", "https://" + "a" * 5000 + ".com/",
        "file:///etc/passwd", "gopher://x.example.com/", "//images.example.com/", "https://example.com%00.evil.com/",
        "https://[v1.example.com]/",
    ],
    ids=lambda url: ascii(url)[:40],
)  # fmt: skip
async def test_urls_are_read_strictly(web: Web, url: str) -> None:
    """What readers could disagree on is refused before anything is looked up."""
    error = await refusal(web, url)

    assert (400, "invalid_image_url", []) == (error.status, error.code, web.lookups)
    assert url not in error.message


@pytest.mark.parametrize(
    ("rules", "allowed", "refused"),
    [
        ("*", [URL], [f"https://{HOST}:8443/"]),
        (f"{HOST}", [URL], [f"https://{OTHER}/a.png"]),
        ("*.example.com", [URL], ["https://example.com/", "https://notexample.com/"]),
        (f"{OTHER}:8443, {HOST}", [URL, f"https://{OTHER}:8443/a.png"], [f"https://{OTHER}/a.png"]),
    ],
)
async def test_hosts_are_the_operator_s(web: Web, rules: str, allowed: list[str], refused: list[str]) -> None:
    """By name and port."""
    assert [PICTURE] * len(allowed) == await fetch(web, *allowed, rules=rules)
    for url in refused:
        assert "invalid_image_url" == (await refusal(web, url, rules=rules)).code


@pytest.mark.parametrize("setting", ["https://example.com", "*.*", "a b", "example.com:0", "example.com:99999", "x/y"])
def test_a_setting_that_is_no_host_is_refused_at_start(setting: str, tmp_path: Path) -> None:
    """With the part at fault."""
    with pytest.raises(ValueError, match="is no host"):
        RecipeSettings(model=tmp_path, entrypoint_address="x:1", image_urls=setting)


def asked(url: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same picture in all APIs: path, and a body that asks about it."""
    chat = {
        "model": "deep",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
    }
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    message = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "model": "deep"}
    return {
        "chat": ("/v1/chat/completions", chat),
        "responses": ("/v1/responses", {"model": "deep", "input": items}),
        "messages": ("/v1/messages", message | {"max_tokens": 99}),
        "counted": ("/v1/messages/count_tokens", message),
        "input_tokens": ("/v1/responses/input_tokens", {"input": items}),
        "tokenize": ("/tokenize", {"messages": chat["messages"]}),
    }


async def test_all_apis_take_urls(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is that of the same bytes in a data: URL; what is no image is a 400 that names its place."""
    at_hand = partial(ImageFetcher, resolve=web.resolve, dial=web.dial)
    monkeypatch.setattr("services.recipe.server.ImageFetcher", at_hand)
    folder, card = write_folder(tmp_path / "deep"), ModelCard(name="deep", context_tokens=4096, takes_images=True)
    web.pages |= {
        "/page": ok(b"<html>hello</html>", "Content-Type: image/png"),
        "/bomb": ok(png(1, 1).replace(b"\0\0\0\1\0\0\0\1\x08", b"\0\0\x4e\x20\0\0\x4e\x20\x08", 1)),
    }
    async with serve_recipe(answering("</think>ok"), folder, card=card, image_urls="*") as recipe:
        for name, (path, body) in asked(URL).items():
            fetched = await recipe.post(path, body)
            given = await recipe.post(*asked(data_url(PICTURE))[name])
            assert (200, 200) == (fetched.status_code, given.status_code), fetched.text
            if name in {"counted", "input_tokens", "tokenize"}:
                assert given.json() == fetched.json()
        requests = recipe.entrypoint.submitted
        for theirs, ours in zip(requests[::2], requests[1::2], strict=True):
            assert list(ours.prompt_token_ids) == list(theirs.prompt_token_ids)
            assert list(ours.images) == list(theirs.images)
        for path in ("/page", "/bomb", "/missing"):
            for name, (where, body) in asked(f"https://{HOST}{path}").items():
                raw = await recipe.post(where, body)
                assert (400, True) == (raw.status_code, "content[0]" in raw.text), (name, raw.text)
                assert HOST not in raw.text


@pytest.mark.asyncio(loop_scope="session")
async def test_off_by_default(deep: Running) -> None:
    """A URL is a 400 that names its place and says what would be right; nothing is looked up."""
    for path, body in asked(URL).values():
        raw = await deep.post(path, body)
        assert (400, True) == (raw.status_code, "data: URL" in raw.text), raw.text
        assert "content[0]" in raw.text
    assert not deep.entrypoint.submitted
