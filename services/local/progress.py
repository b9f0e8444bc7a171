"""How does a person see what is going on while the suite starts?"""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from services.local.health import WAITING, Health

BAR_CELLS = 20


class Display(Protocol):
    """Shows stages; a terminal gets a live table, a pipe gets a line for each change."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def install(self, stage: str, done: int, total: int) -> None:
        """Show how far the model's download and conversion is."""

    def services(self, health: Sequence[Health]) -> None:
        """Show where every process stands."""

    def say(self, line: str) -> None:
        """Print a line that stays."""


def display() -> Display:
    """Return the display that fits standard output."""
    return LiveDisplay() if sys.stdout.isatty() else LineDisplay()


def share(done: int, total: int) -> str:
    """Return progress in words: a percentage where the length is known, a count where it is not."""
    if total > 0:
        return f"{min(100, 100 * done // total)}%"
    return str(done) if done else ""


class LineDisplay:
    """Plain lines, each said once; percentages in steps of 25 so that a log stays short."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def install(self, stage: str, done: int, total: int) -> None:
        self._change("model", stage, done, total)

    def services(self, health: Sequence[Health]) -> None:
        for one in health:
            if one.stage != WAITING:
                self._change(one.process.name, one.stage, one.done, one.total)

    def say(self, line: str) -> None:
        print(line, flush=True)

    def _change(self, name: str, stage: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total > 0 else 0
        if self._said.get(name) != (stage, quarter):
            self._said[name] = (stage, quarter)
            self.say(
                " ".join(word for word in (f"{name}:", stage, share(done, total) if stage != "ready" else "") if word)
            )


class LiveDisplay:
    """A table that redraws in place and leaves no trace but the lines said."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), transient=True, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def install(self, stage: str, done: int, total: int) -> None:
        self._live.update(_table([("model", stage, done, total)]))

    def services(self, health: Sequence[Health]) -> None:
        self._live.update(_table([(one.process.name, one.stage, one.done, one.total) for one in health]))

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(rows: Sequence[tuple[str, str, int, int]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, stage, done, total in rows:
        ready = stage == "ready"
        filled = BAR_CELLS if ready else (BAR_CELLS * min(done, total) // total if total > 0 else 0)
        colour = "green" if ready else "yellow"
        bar = f"[{colour}]{'━' * filled}[/][dim]{'─' * (BAR_CELLS - filled)}[/]"
        table.add_row(f"[bold]{name}[/]", bar, stage, "" if ready else share(done, total))
    return table
