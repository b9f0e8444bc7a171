"""How is a request's journey drawn in a terminal?"""

from collections.abc import Iterator, Sequence

from services.local.console.journey import MAX_INDENT, Journey, clock, millis

LEAST_BAR, MOST_BAR = 16, 64
_FULL, _TRACK = "█", "·"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def list_lines(journeys: Sequence[Journey]) -> list[str]:
    """Return a table of requests, newest first."""
    if not journeys:
        return ['no request was recorded yet; ask something: fathom chat "Count from one to ten."']
    rows = [("request", "at", "model", "in", "cached", "out", "TTFT ms", "total ms", "end")]
    rows += [
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
    return [*_aligned(rows, numbers={3, 4, 5, 6, 7}), "", "one request's way: fathom trace REQUEST"]


def journey_lines(journey: Journey, *, columns: int) -> list[str]:
    """Return totals, and then a line a span: who, what, when, and a bar on one time axis. columns: of the terminal."""
    total = journey.total_seconds
    cells = [("service", "what", "begins", "takes", "")]
    cells += [
        (
            row.service,
            "  " * min(row.depth, MAX_INDENT) + row.name + (" FAILED" if row.is_error else ""),
            millis(row.start_seconds),
            millis(row.seconds),
            ", ".join(row.notes),
        )
        for row in journey.rows
    ]
    named = _aligned([row[:4] for row in cells], numbers={2, 3}, keeps_end=True)
    notes_width = max(len(row[4]) for row in cells)
    width = min(MOST_BAR, max(LEAST_BAR, columns - len(named[0]) - notes_width - 4))
    bars = [
        axis(total, width),
        *(bar(row.start_seconds, row.seconds, total, width) for row in journey.rows),
    ]
    drawn = [f"{name}  {mark}  {row[4]}".rstrip() for name, mark, row in zip(named, bars, cells, strict=True)]
    return [*_totals(journey), "", *drawn]


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
    yield f"request {journey.id}  {journey.operation}  {journey.model}  {journey.outcome}"
    yield f"TTFT {millis(journey.ttft_seconds)} ms  total {millis(journey.total_seconds)} ms  {tokens}"
    services = dict.fromkeys(row.service for row in journey.rows)
    yield f"services: {', '.join(services)}"
    if not journey.is_finished:
        yield "it has not finished yet: only what has ended is shown"


def _aligned(rows: Sequence[Sequence[str]], *, numbers: set[int], keeps_end: bool = False) -> list[str]:
    """Return rows as lines of columns; those in `numbers` end flush."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return [line if keeps_end else line.rstrip() for line in lines]
