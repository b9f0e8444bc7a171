"""How is a request's journey drawn in a terminal?"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from rich.cells import cell_len, chop_cells, set_cell_size

from services.local.console.journey import MAX_INDENT, Journey, clock, millis

LEAST_BAR, MOST_BAR = 16, 64
LEAST_WHAT, LEAST_SERVICE, LEAST_MODEL, LEAST_END, LEAST_ID = 12, 12, 6, 10, 8
LEAST_NOTE = 24
ID_INDENT = "  "
"""Before the rest of a request whose id has a line to itself."""
_FULL, _TRACK = "█", "·"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_NUMBERS = frozenset({3, 4, 5, 6, 7})
"""Columns of the list that hold numbers."""


def list_lines(journeys: Sequence[Journey], *, columns: int | None) -> list[str]:
    """Return a table of requests, newest first. columns: of the terminal, into which models and ids are cut to fit.

    None cuts nothing. Where ids differ only behind what fits, each has a line to itself, whole.
    """
    if not journeys:
        return ['no request was recorded yet; ask something: fathom chat "Count from one to ten."']
    head = ("request", "at", "model", "in", "cached", "out", "TTFT ms", "total ms", "end")
    rows: list[tuple[str, ...]] = [
        (
            one.id,
            clock(one.started_unix_seconds),
            one.model,
            str(one.prompt_tokens),
            str(one.cached_tokens),
            str(one.output_tokens),
            millis(one.ttft_seconds),
            millis(one.total_seconds),
            one.outcome,
        )
        for one in journeys
    ]
    above: list[list[str]] = [[] for _ in rows]
    if columns is not None:
        surplus = max(map(cell_len, _aligned([head, *rows], numbers=_NUMBERS))) - columns
        surplus -= _cut(rows, 2, surplus, least=LEAST_MODEL)
        surplus -= _cut(rows, 8, surplus, least=LEAST_END)
        # The begin of an id names its request as well, as long as nothing is put behind it.
        if surplus > _cut(rows, 0, surplus, least=_telling_cells([one.id for one in journeys]), mark=""):
            above = [_wrapped(one.id, columns) for one in journeys]
            rows = [(ID_INDENT, *row[1:]) for row in rows]
    title, *lines = _aligned([head, *rows], numbers=_NUMBERS)
    drawn = chain.from_iterable((*ids, line) for ids, line in zip(above, lines, strict=True))
    return [title, *drawn, "", "one request's way: fathom trace REQUEST"]


def journey_lines(journey: Journey, *, columns: int) -> list[str]:
    """Return totals, and then a line a span: who, what, when, and a bar on one time axis. columns: of the terminal.

    Where notes do not fit beside the bars, they stand below their span.
    """
    total = journey.total_seconds
    head = ("service", "what", "begins", "takes")
    cells: list[tuple[str, ...]] = [
        (
            row.service,
            "  " * min(row.depth, MAX_INDENT) + row.name + (" FAILED" if row.is_error else ""),
            millis(row.start_seconds),
            millis(row.seconds),
        )
        for row in journey.rows
    ]
    surplus = cell_len(_aligned([head, *cells], numbers={2, 3}, keeps_end=True)[0]) + 2 + LEAST_BAR - columns
    surplus -= _cut(cells, 1, surplus, least=LEAST_WHAT)
    _cut(cells, 0, surplus, least=LEAST_SERVICE)
    title, *named = _aligned([head, *cells], numbers={2, 3}, keeps_end=True)
    notes = [", ".join(row.notes) for row in journey.rows]
    room = columns - len(title) - 2
    is_beside = room - 2 - max(map(cell_len, notes)) >= LEAST_BAR
    width = min(MOST_BAR, max(LEAST_BAR, room - 2 - max(map(cell_len, notes)) if is_beside else room))
    drawn = [f"{title}  {axis(total, width)}"]
    for name, note, row in zip(named, notes, journey.rows, strict=True):
        line = f"{name}  {bar(row.start_seconds, row.seconds, total, width)}"
        drawn.append(f"{line}  {note}".rstrip() if is_beside else line)
        if note and not is_beside:
            drawn += _below(note, title.index("what") + 2 * min(row.depth, MAX_INDENT) + 2, columns)
    totals = (_wrapped(line, columns, rest="  ") for line in _totals(journey))
    return [*chain.from_iterable(totals), "", *drawn]


def bar(start: float, seconds: float, total: float, width: int) -> str:
    """Return a span's place on an axis of `width` letters; one of microseconds is still seen."""
    if total <= 0:
        return _TRACK * width
    begin = min(width - 1, max(0, int(start / total * width)))
    eighths = min(8 * (width - begin), max(1, round(seconds / total * width * 8)))
    whole, rest = divmod(eighths, 8)
    drawn = _FULL * whole + (_EIGHTHS[rest] if rest else "")
    return (_TRACK * begin + drawn).ljust(width, _TRACK)


def axis(total: float, width: int) -> str:
    """Return the time axis over the bars: its two ends."""
    end = f"{millis(total)} ms"
    return "0" + end.rjust(width - 1)


def _totals(journey: Journey) -> Iterator[str]:
    tokens = f"{journey.prompt_tokens} prompt tokens, {journey.cached_tokens} cached, {journey.output_tokens} out"
    known = (journey.operation, journey.model, journey.outcome)
    yield "  ".join((f"request {journey.id}", *(word for word in known if word)))
    if journey.is_running:
        yield f"running for {millis(journey.total_seconds)} ms so far"
    else:
        yield f"TTFT {millis(journey.ttft_seconds)} ms  total {millis(journey.total_seconds)} ms  {tokens}"
    services = dict.fromkeys(row.service for row in journey.rows)
    yield f"services: {', '.join(services)}"
    if journey.caveat:
        yield journey.caveat


# Widths are counted in cells of a terminal: one letter of an id, a model or a span may take two of them.


def _cut(rows: list[tuple[str, ...]], column: int, surplus: int, *, least: int, mark: str = "…") -> int:
    """Cut a column of `rows` by `surplus` cells, and to no less than `least`; return by how many it was cut."""
    widest = max(cell_len(row[column]) for row in rows)
    width = max(least, widest - surplus)
    if surplus <= 0 or width >= widest:
        return 0
    for number, row in enumerate(rows):
        text = row[column]
        if cell_len(text) > width:
            text = set_cell_size(text, width - len(mark)) + mark
        rows[number] = (*row[:column], text, *row[column + 1 :])
    return widest - width


def _telling_cells(ids: Sequence[str]) -> int:
    """Return how many cells still tell these ids apart."""
    letters = LEAST_ID
    while len({one[:letters] for one in ids}) < len(set(ids)):
        letters += 1
    return max(cell_len(one[:letters]) for one in ids)


def _below(note: str, indent: int, columns: int) -> list[str]:
    """Return a note on lines of its own."""
    indent = max(0, min(indent, columns - LEAST_NOTE))
    return _wrapped(note, max(columns, LEAST_NOTE), first=" " * indent, rest=" " * indent)


def _wrapped(text: str, columns: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return lines of at most `columns` cells, broken between words, or within one that is wider than a line.

    first, rest: what the first line and all others begin with.
    """
    lines, has_words = [first], False
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if has_words else lines[-1] + word
        if cell_len(longer) <= columns:
            lines[-1], has_words = longer, True
        elif word:
            pieces = [rest + piece for piece in chop_cells(word, columns - len(rest))]
            lines = [*lines, *pieces] if has_words else pieces
            has_words = True
    return [line.rstrip() for line in lines]


def _aligned(rows: Sequence[Sequence[str]], *, numbers: AbstractSet[int], keeps_end: bool = False) -> list[str]:
    """Return rows as lines of columns; those in `numbers` end flush."""
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if column in numbers else set_cell_size(cell, width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return [line if keeps_end else line.rstrip() for line in lines]
