"""What did the processes write, in the order they wrote it?"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.local.home import Home

POLL_SECONDS = 0.25


class NoSuchLog(Exception):  # noqa: N818 - reads as what happened
    """Nothing here wrote a log of that name; the text says which there are."""


def log_files(home: Home, service: str | None) -> list[Path]:
    """Return the logs of a process ("decode-0") or of all replicas of a service ("decode"); all logs for None."""
    every = sorted(home.logs.glob("*.log"))
    chosen = [
        path for path in every if service is None or path.stem == service or path.stem.rpartition("-")[0] == service
    ]
    if not chosen:
        names = ", ".join(path.stem for path in every)
        raise NoSuchLog(
            f"no log of {service or 'any service'} here" + (f"; there are {names}" if names else ": nothing ran yet")
        )
    return chosen


def written_at(line: str) -> str:
    """Return a JSON line's timestamp (ISO 8601 UTC sorts as text); empty for any other line."""
    if line.startswith("{"):
        try:
            return str(json.loads(line).get("timestamp", ""))
        except ValueError:
            return ""
    return ""


def merged(logs: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, str]]:
    """Return (name, line) of all logs by time. A line without a time (a traceback's) stays with the one before."""
    stamped: list[tuple[str, int, int, str, str]] = []
    for position, (name, lines) in enumerate(logs):
        latest = ""
        for number, line in enumerate(lines):
            latest = max(latest, written_at(line))
            stamped.append((latest, position, number, name, line))
    return [(name, line) for _, _, _, name, line in sorted(stamped)]


@dataclass(slots=True)
class Tail:
    """Reads what is added to one log; a partial last line waits for its end."""

    path: Path
    offset: int = 0
    partial: bytes = field(default=b"")

    def read(self) -> list[str]:
        """Return the whole lines added since the last call."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:  # a new run began a new file
                    self.offset, self.partial = 0, b""
                file.seek(self.offset)
                added = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(added)
        *lines, self.partial = (self.partial + added).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def follow(
    home: Home, service: str | None, *, num_lines: int, is_written: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Yield "name | line": the last `num_lines` of each log first, then what is added, for as long as `is_written`."""
    tails = [Tail(path) for path in log_files(home, service)]
    width = max(len(tail.path.stem) for tail in tails)
    # Everything is read, for zero lines too: what follows is what is added from here on.
    begun = [(tail.path.stem, tail.read()) for tail in tails]
    history = [(name, lines[-num_lines:] if num_lines else []) for name, lines in begun]
    yield from (f"{name:<{width}} | {line}" for name, line in merged(history))
    goes_on = True
    while goes_on:
        goes_on = is_written()  # asked before the last look, which then finds what was written until the end
        if goes_on:
            time.sleep(POLL_SECONDS)
        yield from (
            f"{name:<{width}} | {line}" for name, line in merged([(tail.path.stem, tail.read()) for tail in tails])
        )
