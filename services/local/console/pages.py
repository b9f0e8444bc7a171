"""What do the console's pages say? Everything that came from outside is escaped where it is put in."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from urllib.parse import quote

from services.local.console.drawing import bar, service_map
from services.local.console.journey import MAX_INDENT, Journey, Row, clock, millis
from services.local.console.style import CSS
from services.local.console.view import Process, View
from services.local.console.web import NOTHING_LOADS
from services.local.sizes import in_words

_STYLE_HASH = base64.b64encode(hashlib.sha256(CSS.encode()).digest()).decode()
POLICY = f"{NOTHING_LOADS}; style-src 'sha256-{_STYLE_HASH}'; img-src data:"


def front(view: View | None, journeys: Sequence[Journey], figures: Mapping[str, int], *, live_seconds: int = 0) -> str:
    """Return the first page. live_seconds: reload it that often; 0 for never."""
    switch = '<a href="/">Stop reloading</a>' if live_seconds else '<a href="/?live">Reload every 2 seconds</a>'
    suite = (
        f'<p>{escape(view.model)} at <a href="{escape(view.url)}/docs">{escape(view.url)}</a>. {switch}</p>'
        f"{_load(view)}{_processes(view.processes)}"
        if view is not None
        else "<p>The suite has only just begun to start.</p>"
    )
    body = f"<h1>Fathom</h1>{suite}{_requests(journeys)}{_figures(figures)}"
    reload = f'<meta http-equiv="refresh" content="{live_seconds}">' if live_seconds else ""
    return _html("Fathom", body, reload)


def request(journey: Journey) -> str:
    """Return the page of one request: totals, the map, the waterfall."""
    others = " ".join(f'<span class="id">{escape(other)}</span>' for other in journey.also)
    still = f"<p><strong>{escape(journey.caveat)}.</strong></p>" if journey.caveat else ""
    body = (
        f'<p><a href="/">All requests</a></p><h1>Request <span class="id">{escape(journey.id)}</span></h1>{still}'
        f"{_totals(journey)}"
        f"<h2>Its way</h2>{service_map(journey)}"
        f"<h2>Its time</h2>{_waterfall(journey)}"
        f'<p class="quiet">Also known as {others}. In a terminal: <code>fathom trace {escape(journey.id)}</code></p>'
    )
    return _html(f"Request {journey.id}", body)


def missing(reason: str) -> str:
    """Return the page of a request that is not here."""
    return _html(
        "No such request", f'<h1>No such request</h1><p>{escape(reason)}.</p><p><a href="/">All requests</a></p>'
    )


def seconds_in_words(seconds: float) -> str:
    """Return "37 s", "4 min", "2 h 5 min" or "3 d 4 h"."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def _html(title: str, body: str, head: str = "") -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"{head}<title>{escape(title)}</title><style>{CSS}</style></head>"
        f'<body><a class="skip" href="#main">Skip to content</a><main id="main">{body}</main></body></html>'
    )


def _load(view: View) -> str:
    gauges: dict[str, float] = {}
    for process in view.processes:
        for name, value in process.gauges.items():
            gauges[name] = gauges.get(name, 0.0) + value
    cards = [("requests running", _number(gauges, "fathom_recipe_open_requests"))]
    for engine in ("prefill", "decode"):
        running, queued = (_number(gauges, f"fathom_{engine}_{what}_sequences") for what in ("running", "queued"))
        used, total, cached = (
            _number(gauges, f"fathom_{engine}_{what}_blocks") for what in ("used", "total", "cached")
        )
        cards += [
            (f"{engine}: running, queued", f"{running}, {queued}"),
            (f"{engine}: KV blocks in use", f"{used} of {total} ({cached} cached)"),
        ]
    disk, most = (in_words(gauges.get(f"fathom_kvstore_{what}_bytes", 0.0)) for what in ("disk", "max"))
    stored = f"{_number(gauges, 'fathom_kvstore_blocks')} blocks, {disk} of {most}"
    cards.append(("kvstore holds", stored))
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cards)
    return f'<h2>Load</h2><dl class="cards">{items}</dl>'


def _number(gauges: Mapping[str, float], name: str) -> str:
    return f"{gauges[name]:.0f}" if name in gauges else "-"


def _processes(processes: Iterable[Process]) -> str:
    rows = "".join(
        f'<tr><td class="who {escape(one.service)}">{escape(one.service)}</td><td>{escape(one.replica)}</td>'
        f"<td>{_state(one)}</td>"
        f'<td class="number">{seconds_in_words(one.uptime_seconds) if one.uptime_seconds is not None else "-"}</td>'
        f'<td class="number">{one.restarts}</td>'
        f'<td class="number">{in_words(one.resident_bytes) if one.resident_bytes is not None else "-"}</td>'
        f"<td>{_metrics(one)}</td></tr>"
        for one in processes
    )
    head = _head(("service", "replica", "state", "=up for", "=restarts", "=memory", "metrics"))
    return f"<h2>Services</h2>{_table('Services', head, rows)}"


def _state(one: Process) -> str:
    return '<span class="good">ready</span>' if one.is_ready else f'<span class="bad">{escape(one.stage)}</span>'


def _metrics(one: Process) -> str:
    if not one.metrics_url:
        return ""
    label = escape(f"metrics of {one.replica}")
    return f'<a href="{escape(one.metrics_url)}" aria-label="{label}">metrics</a>'


def _requests(journeys: Sequence[Journey]) -> str:
    if not journeys:
        return (
            '<h2>Newest requests</h2><p>None yet. Ask something: <code>fathom chat "Count from one to ten."</code></p>'
        )
    rows = "".join(
        f'<tr><td><a class="id" href="/request?id={quote(one.id, safe="")}">{escape(one.id)}</a></td>'
        f"<td>{clock(one.started_unix_seconds)}</td><td>{escape(one.model)}</td><td>{escape(one.operation)}</td>"
        f'<td class="number">{one.prompt_tokens}</td><td class="number">{one.cached_tokens}</td>'
        f'<td class="number">{one.output_tokens}</td><td class="number">{millis(one.ttft_seconds)}</td>'
        f'<td class="number">{millis(one.total_seconds)}</td><td>{escape(one.outcome)}</td></tr>'
        for one in journeys
    )
    head = _head(
        ("request", "at", "model", "asked for", "=tokens in", "=cached", "=out", "=TTFT, ms", "=total, ms", "end")
    )
    return f"<h2>Newest requests</h2>{_table('Newest requests', head, rows)}"


def _totals(journey: Journey) -> str:
    cards = (
        ("asked at", clock(journey.started_unix_seconds)),
        ("end", journey.outcome),
        ("time to first token", f"{millis(journey.ttft_seconds)} ms"),
        ("total", f"{millis(journey.total_seconds)} ms"),
        ("prompt tokens", f"{journey.prompt_tokens} ({journey.cached_tokens} cached)"),
        ("tokens out", str(journey.output_tokens)),
        ("model", journey.model),
    )
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in cards)
    return f'<dl class="cards">{items}</dl>'


def _waterfall(journey: Journey) -> str:
    total = journey.total_seconds
    ticks = "".join(f"<span>{millis(total * part / 4)}</span>" for part in range(5))
    rows = "".join(_waterfall_row(row, total) for row in journey.rows)
    head = (
        '<thead><tr><th scope="col">service</th><th scope="col">what</th><th scope="col" class="number">begins, ms</th>'
        '<th scope="col" class="number">takes, ms</th>'
        f'<th scope="col" class="bar"><span class="axis">{ticks}</span></th></tr></thead>'
    )
    return _table("Spans", head, rows)


def _waterfall_row(row: Row, total_seconds: float) -> str:
    notes = ", ".join(row.notes)
    failed = ' <span class="bad">failed</span>' if row.is_error else ""
    return (
        f'<tr class="{escape(row.service)}"><td class="who">{escape(row.service)}</td>'
        f'<td><span class="tree">{"  " * min(row.depth, MAX_INDENT)}</span>{escape(row.name)}{failed} '
        f'<span class="quiet">{escape(notes)}</span></td>'
        f'<td class="number">{millis(row.start_seconds)}</td><td class="number">{millis(row.seconds)}</td>'
        f'<td class="bar">{bar(row, total_seconds)}</td></tr>'
    )


def _figures(figures: Mapping[str, int]) -> str:
    lost = figures["num_malformed_spans"] + figures["num_malformed_messages"] + figures["num_overflowing_spans"]
    unsent = figures["num_unforwarded_messages"]
    return (
        f'<p class="quiet">{figures["num_traces"]} traces kept in {in_words(figures["num_bytes"])} of memory, '
        f"{figures['num_evicted_traces']} given up for newer ones; {figures['num_spans']} spans came, "
        f"{lost} were dropped"
        f"{f', {unsent} messages could not be passed on' if unsent else ''}. "
        "In a terminal: <code>fathom trace</code>. Nothing of what was asked or answered is in a span.</p>"
    )


def _table(name: str, head: str, rows: str) -> str:
    """Return a table that scrolls by itself where the window is narrow, with the keyboard too."""
    region = f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">'
    return f"{region}<table>{head}<tbody>{rows}</tbody></table></div>"


def _head(columns: Sequence[str]) -> str:
    """Return a table's head. A name that begins with "=" is a column of numbers."""
    cells = "".join(f'<th scope="col" class="{_kind(name)}">{escape(name.removeprefix("="))}</th>' for name in columns)
    return f"<thead><tr>{cells}</tr></thead>"


def _kind(column: str) -> str:
    return "number" if column.startswith("=") else "words"
