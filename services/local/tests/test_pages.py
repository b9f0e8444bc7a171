"""Does the console's page tell all, hurt nobody, and can everybody read it?"""

import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from http import HTTPStatus
from pathlib import Path

import pytest

from services.chassis.config import SERVICES
from services.local.console import pages, style
from services.local.console.collector import Counts
from services.local.console.drawing import PLACES
from services.local.console.requests import newest
from services.local.console.site import Site
from services.local.console.spans import SHOWN_ID
from services.local.console.traces import TraceStore
from services.local.console.view import Process, View, Watch, read_gauges
from services.local.console.web import read_head
from services.local.tests.span_makers import NOON, edge, whole_request

ATTACK = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"
FIGURES = asdict(Counts()) | dict.fromkeys(
    ("num_traces", "num_bytes", "num_evicted_traces", "num_overflowing_spans"), 0
)


class Reader(HTMLParser):
    """Collects what a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def process(service: str, **more) -> Process:
    given = {"is_ready": True, "stage": "ready", "uptime_seconds": 75.0, "restarts": 2, "resident_bytes": 66 << 20}
    url = "http://127.0.0.1:1/metrics"
    return Process(**{"service": service, "replica": f"{service}-0", "metrics_url": url, "gauges": {}, **given, **more})


def view(*processes: Process) -> View:
    return View("http://127.0.0.1:8000", "m", processes)


def test_the_first_page_shows_every_service_and_its_load() -> None:
    """State, uptime, restarts, memory, metrics; running requests and KV blocks."""
    gauges = read_gauges(
        "# HELP x\nfathom_decode_used_blocks 12.0\nfathom_decode_total_blocks 363.0\nfathom_decode_used_blocks_total 9\n"
        "fathom_recipe_open_requests 3.0\nfathom_kvstore_disk_bytes 2.147483648e+09\n"
    )
    processes = [process(service) for service in SERVICES] + [
        process("nats", is_ready=False, stage="starting", gauges=gauges)
    ]
    page = Reader(
        pages.front(view(*processes[:-1], replace(processes[-1])), newest([whole_request()], 20, now=NOON), FIGURES)
    )

    for word in (*SERVICES, "starting", "1 min", "66 MiB", "12 of 363", "2.0 GiB of", "request-one", "200 stop"):
        assert word in page.text
    assert len(SERVICES) + 1 == len(
        [1 for tag, at in page.tags if tag == "a" and at["href"] == "http://127.0.0.1:1/metrics"]
    )


def test_the_page_of_a_request_names_every_service_and_numbers_the_way() -> None:
    """As text in the map too, for those who cannot see it."""
    page = Reader(pages.request(newest([whole_request()], 1, now=NOON)[0]))
    (label,) = [at["aria-label"] for tag, at in page.tags if tag == "svg" and at.get("class") == "map"]

    assert set(SERVICES) == PLACES.keys()
    assert label is not None
    assert "1. recipe to entrypoint; 2. entrypoint to kvstore;" in label
    assert "7. prefill to decode." in label
    assert 10 == len([1 for tag, at in page.tags if tag == "rect" and at.get("class") == "work"])
    assert {"recipe taken", "vision"} <= {at.get("class") for tag, at in page.tags if tag == "g"}


def test_what_callers_write_stays_text() -> None:
    """Request ids, models and span names come from outside: not a tag, an attribute or a link more than without them."""
    evil = newest([[edge()]], 1, now=NOON)[0]
    row = replace(evil.rows[0], service=ATTACK, name=ATTACK, notes=(ATTACK,))
    harmless = newest([[edge(attributes={SHOWN_ID: "x"})]], 1, now=NOON)[0]
    evil = replace(
        evil, id=ATTACK, model=ATTACK, operation=ATTACK, also=(ATTACK,), path=((ATTACK, ATTACK),), rows=(row,)
    )
    for draw in (
        pages.request,
        lambda journey: pages.front(view(process(journey.id, stage=journey.id, is_ready=False)), [journey], FIGURES),
        lambda journey: pages.missing(journey.id),
    ):
        mine, theirs = Reader(draw(harmless)), Reader(draw(evil))

        allowed = {tag for tag, _ in mine.tags}
        assert allowed == {tag for tag, _ in theirs.tags}
        assert {name for _, at in mine.tags for name in at} >= {name for _, at in theirs.tags for name in at}
        assert ATTACK in theirs.text


@pytest.mark.parametrize("name", ["front", "request"])
def test_a_page_needs_nothing_from_outside_and_no_script(name: str) -> None:
    """The policy allows one style, by its hash, and this page has no other; it works offline."""
    journey = newest([whole_request()], 1, now=NOON)[0]
    text = pages.request(journey) if name == "request" else pages.front(view(process("recipe")), [journey], FIGURES)
    page = Reader(text)

    assert not {"script", "link", "iframe", "form", "img"} & {
        tag for tag, at in page.tags if at.get("href") != "data:,"
    }
    assert not [at for _, at in page.tags if "style" in at or any(key.startswith("on") for key in at)]
    assert 1 == text.count("<style>")
    assert "style-src 'sha256-" in pages.POLICY
    assert "unsafe" not in pages.POLICY
    assert not re.search(r"url\(|@import", style.CSS)


def test_the_page_can_be_read_and_walked_by_everybody() -> None:
    """A language, a skip link, headed columns, labelled regions that scroll by keyboard, no reload unless asked for."""
    journey = newest([whole_request()], 1, now=NOON)[0]
    for text in (pages.request(journey), pages.front(view(process("recipe")), [journey], FIGURES)):
        page = Reader(text)
        assert ("html", {"lang": "en"}) in page.tags
        assert ("a", {"class": "skip", "href": "#main"}) in page.tags
        assert {"col"} == {at.get("scope") for tag, at in page.tags if tag == "th"}
        assert all(at.get("aria-label") for _, at in page.tags if at.get("role") == "region")
        assert 'http-equiv="refresh"' not in text
    assert '<meta http-equiv="refresh" content="2">' in pages.front(None, [], FIGURES, live_seconds=2)


@pytest.mark.parametrize("scheme", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_colours_have_contrast(scheme: dict[str, str]) -> None:
    """Text 4.5:1 against both backgrounds, bars and lines 3:1 (WCAG 2.2)."""
    for ground in ("ground", "card"):
        for name in ("text", "quiet", "link", "good", "bad"):
            assert contrast(scheme[name], scheme[ground]) >= 4.5, (name, ground)
        for name in (*SERVICES, "line"):
            assert contrast(scheme[name], scheme[ground]) >= 3.0, (name, ground)


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' relative luminances, as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/", HTTPStatus.OK, "only just begun to start"),
        ("/request?id=last", HTTPStatus.OK, "request-one"),
        ("/request?id=nope", HTTPStatus.NOT_FOUND, "no request"),
        ("/api/requests", HTTPStatus.OK, '"cached_tokens": 256'),
        ("/api/request?id=request-one", HTTPStatus.OK, '"rows": [{"depth": 0, "service": "recipe"'),
        ("/api/request?id=../nope", HTTPStatus.NOT_FOUND, "no request '../nope' among the newest 1"),
        ("/api/request", HTTPStatus.NOT_FOUND, "no request ''"),
        ("/api/request?id=reque", HTTPStatus.NOT_FOUND, "at least 6 of its characters"),
        ("/healthz", HTTPStatus.OK, '"ready": true'),
        ("/../state.json", HTTPStatus.NOT_FOUND, "there are / and"),
    ],
)
async def test_every_address_has_an_answer(tmp_path: Path, path: str, status: HTTPStatus, word: str) -> None:
    """Before the suite's state is there, too."""
    store = TraceStore()
    store.add(whole_request())
    asked = read_head(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert asked is not None
    reply = await Site(store, Counts(), Watch(tmp_path / "none.json")).answer(asked)

    assert (status, True) == (reply.status, word in reply.body.decode()), reply.body
