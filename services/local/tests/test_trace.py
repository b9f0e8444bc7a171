"""Does `fathom trace` draw a request's way, and say what to do where it cannot?"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from services.chassis import names
from services.chassis.testing import free_port
from services.local import state
from services.local import trace as trace_command
from services.local.commands import app
from services.local.console.collector import Counts
from services.local.console.requests import find, newest
from services.local.console.site import Site
from services.local.console.traces import TraceStore
from services.local.console.view import Watch
from services.local.console.web import WebServer
from services.local.home import Home
from services.local.tests.span_makers import NOON, edge, span, whole_request
from services.local.trace_text import bar, journey_lines, list_lines


@pytest.mark.parametrize(
    ("start", "seconds", "expected"),
    [
        (0.0, 1.0, "████████"),
        (0.5, 0.25, "····██··"),
        (0.5, 0.1875, "····█▌··"),
        (0.999, 0.0, "·······▏"),
        (0.25, 9.0, "··██████"),
        (-1.0, 0.5, "████····"),
    ],
)
def test_a_bar_stands_where_its_span_was(start: float, seconds: float, expected: str) -> None:
    """Every span is seen, and none leaves the axis."""
    assert expected == bar(start, seconds, total=1.0, width=8)


def test_a_request_is_drawn_with_totals_services_and_a_line_a_span() -> None:
    """Children are indented below their parents; the bars stand on one axis."""
    journey = newest([whole_request()], 1, now=NOON)[0]
    lines = journey_lines(journey, columns=140)

    assert "request request-one  chat  m  200 stop" == lines[0]
    assert "TTFT 250 ms  total 2000 ms  300 prompt tokens, 256 cached, 7 out" == lines[1]
    assert {"recipe", "entrypoint", "kvstore", "prefill_lb", "prefill", "decode_lb", "decode"} == set(
        lines[2].removeprefix("services: ").split(", ")
    )
    drawn = lines[5:]
    assert len(whole_request()) == len(drawn)
    assert drawn[0].startswith("recipe      chat m")
    assert drawn[1].startswith("entrypoint    entrypoint.generate")
    assert 1 == len({len(line) for line in (text.partition("█")[0] for text in drawn[:1])})
    assert max(len(line) for line in lines) <= 140


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_drawing_fits_the_terminal(columns: int) -> None:
    """Notes that have no room beside the bars stand below their span; bars shrink to a least width and no further."""
    notes = {names.KV_TOKENS: 10_000, names.HANDOFF_BACKEND: "shm", names.HANDOFF_BYTES: 3_000_000}
    deep = [span(20 + n, "entrypoint", f"fathom.v1.Service{n}/Call", 19 + n) for n in range(9)]
    spans = [*whole_request(), span(19, "prefill", "handoff", 6, attributes=notes), *deep]
    journey = newest([spans], 1, now=NOON)[0]
    lines = journey_lines(journey, columns=columns)
    at = next(number for number, line in enumerate(lines) if "handoff" in line)

    assert any(16 * "█" in line for line in lines)
    assert "KV of 10000 tokens, by shm, 2.9 MiB" in " ".join(" ".join(lines[at : at + 3]).split())
    assert max(map(len, lines)) <= columns


def test_a_running_request_shows_the_time_so_far() -> None:
    """Its tokens are not known yet, and are not said to be none."""
    journey = newest([[span(2, "prefill_lb", "fathom.v1.PrefillLb/Pick", 1, takes=0.5)]], 1, now=NOON + 3)[0]

    assert ["running for 3000 ms so far"] == [line for line in journey_lines(journey, columns=80) if "so far" in line]
    assert "0 prompt tokens" not in "".join(journey_lines(journey, columns=80))


def test_the_list_has_a_line_a_request() -> None:
    """Id, time, model, tokens, TTFT, total and end."""
    lines = list_lines(
        newest([whole_request(), [edge(request_id="other", trace_id="cd" * 16)]], 20, now=NOON), columns=None
    )

    assert {"request-one", "other"} == {line.split()[0] for line in lines[1:3]}
    assert "300     256    7      250      2000  200 stop" in lines[1]
    assert "fathom trace REQUEST" in lines[-1]
    assert "fathom chat" in list_lines([], columns=80)[0]


def test_the_list_fits_the_terminal_and_its_ids_still_name_their_requests() -> None:
    """Models are cut first, with a mark; ids to letters that tell them apart, with none, for they are pasted."""
    ids = [f"{n:x}" * 36 for n in range(3)]
    model = {names.GEN_AI_REQUEST_MODEL: "a-model-with-a-long-name"}
    traces = [[edge(request_id=one, trace_id=f"{n:032x}", attributes=model)] for n, one in enumerate(ids, 1)]
    journeys = newest(traces, 20, now=NOON)

    lines = list_lines(journeys, columns=80)
    assert max(map(len, lines)) <= 80
    assert "a-mod…" in lines[1]
    assert all(find(traces, line.split()[0], now=NOON) for line in lines[1:4])
    assert all(one in "".join(list_lines(journeys, columns=None)) for one in ids)


@pytest.mark.parametrize(
    "ids",
    [["a" * 35, "a" * 34 + "b"], ["世" * 35], ["世" * 64, "世" * 63 + "界"], ["🙂" * 100, "plain-id"]],
    ids=["alike", "wide", "wide and alike", "wider than a line"],
)
def test_ids_of_any_letters_fit_the_terminal(ids: list[str]) -> None:
    """Some letters take two cells; ids that differ at their ends only are shown whole, and still name their requests."""
    traces = [[edge(request_id=one, trace_id=f"{n:032x}")] for n, one in enumerate(ids, 1)]
    journeys = newest(traces, 20, now=NOON)
    listed = list_lines(journeys, columns=80)
    shown = {one.id: journey_lines(one, columns=80) for one in journeys}

    assert max(map(cell_len, (*listed, *(line for lines in shown.values() for line in lines)))) <= 80
    assert all(one in "".join(line.strip() for line in shown[one]) for one in ids)
    named = {found.id for line in listed[1:-2] if (found := find(traces, line.split()[0], now=NOON)) is not None}
    assert {one for one in ids if cell_len(one) <= 80} <= named


def test_wide_names_of_spans_services_and_models_fit_the_terminal() -> None:
    """Whoever sends spans may name them in any script."""
    wide = {names.REPLICA: "副本" * 30, names.GEN_AI_REQUEST_MODEL: "模型" * 20}
    ended = {names.GEN_AI_RESPONSE_FINISH_REASONS: ("結束" * 20,)}
    spans = [edge(attributes=wide | ended), span(2, "服務" * 20, "世" * 60, 1, attributes=wide)]
    journeys = newest([spans], 1, now=NOON)

    assert max(map(cell_len, (*journey_lines(journeys[0], columns=80), *list_lines(journeys, columns=80)))) <= 80


def record(folder: Path, console_url: str) -> None:
    """Write the state of a suite that runs, whose console is there."""
    home = Home.of(folder)
    home.prepare()
    console = state.ProcessState(
        name="console", service="console", address="", health_url=f"{console_url}/healthz", log=""
    )
    me = state.Identity.of(os.getpid())
    suite = state.SuiteState(supervisor=me, url="", model="m", console=console if console_url else None)
    state.write(home.state, suite)


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceStore]:
    """A suite's console in this directory; yields where it keeps what came."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace_command, "ON_THE_WAY_SECONDS", 0.0)
    store = TraceStore()
    loop = asyncio.new_event_loop()
    server = WebServer(Site(store, Counts(), Watch(tmp_path / "none")).answer)
    port = loop.run_until_complete(server.start("127.0.0.1:0"))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    record(tmp_path, f"http://127.0.0.1:{port}")
    yield store
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def test_the_command_asks_the_console(console: TraceStore) -> None:
    """A drawing, the same as JSON, and the list."""
    console.add(whole_request())

    assert "entrypoint.generate" in CliRunner().invoke(app, ["trace", "last"]).output
    told = json.loads(CliRunner().invoke(app, ["trace", "request-one", "--json"]).output)
    assert ("request-one", 10) == (told["id"], len(told["rows"]))
    assert ["request-one"] == [one["id"] for one in json.loads(CliRunner().invoke(app, ["trace", "--json"]).output)]


def test_a_request_that_lacks_the_recipe_s_word_alone_is_waited_for(console: TraceStore) -> None:
    """Each service sends by its own clock: the outermost span can come last, and the drawing is whole all the same."""
    at = time.time() - NOON
    console.add([span(2, "entrypoint", "entrypoint.generate", 1, at=at - 1, attributes={names.REQUEST_ID: "late"})])
    late = threading.Timer(0.5, console.add, [[edge(request_id="late", at=at - 1)]])
    late.start()
    told = json.loads(CliRunner().invoke(app, ["trace", "last", "--json"]).output)
    late.join()

    assert (True, "recipe", 200) == (told["is_finished"], told["rows"][0]["service"], told["status"])


def test_a_word_that_does_not_come_is_not_waited_for_long(console: TraceStore, monkeypatch) -> None:
    """What is known is shown, and that it is not all."""
    monkeypatch.setattr(trace_command, "CLOSING_SECONDS", 0.3)
    at = time.time() - NOON
    console.add([span(2, "entrypoint", "entrypoint.generate", 1, at=at - 1)])

    assert "It has not finished yet" in CliRunner().invoke(app, ["trace", "last"]).output


def test_an_unknown_request_is_refused_with_the_way_out(console: TraceStore) -> None:
    """Whatever was typed: a path or a query does not become another question."""
    console.add(whole_request())
    for typed in ("nope", "../requests/last", "a?b#c", "a/b", "a&id=last", " ", os.fsdecode(b"\xff")):
        refused = CliRunner().invoke(app, ["trace", typed])
        assert 1 == refused.exit_code
        assert "(the newest ones: fathom trace)" in refused.output


def test_before_the_first_request_the_console_says_what_to_do(console: TraceStore) -> None:
    """The list is empty; "last" is none."""
    assert "ask something" in CliRunner().invoke(app, ["trace"]).output
    assert "ask something first" in CliRunner().invoke(app, ["trace", "last"]).output


@pytest.mark.parametrize(
    ("console_url", "expected"),
    [(None, "nothing is running here: run fathom up"), ("", "--no-console"), ("dead", "does not answer")],
)
def test_without_a_console_the_command_says_why(console_url, expected, tmp_path, monkeypatch) -> None:
    """No suite, a suite without one, and one that is being started again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace_command, "ON_THE_WAY_SECONDS", 0.0)
    if console_url is not None:
        record(tmp_path, f"http://127.0.0.1:{free_port()}" if console_url else "")
    result = CliRunner().invoke(app, ["trace", "last"])

    assert 1 == result.exit_code
    assert expected in result.output
