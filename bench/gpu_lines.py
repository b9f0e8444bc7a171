"""How does a bench on a GPU say what it found, so that a run that is cut short has lost nothing?

One JSON line per figure as it is known; with a file, that is a whole document after each of them. Stages say what came
before the first figure: seconds, and what Triton compiled in them or found compiled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Lines:
    """What a bench says."""

    def __init__(self, path: Path | None = None, **head: Any) -> None:
        """path: of the document; None = lines alone.  head: what it begins with."""
        self._path, self._head = path, head
        self.figures: list[dict[str, Any]] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def say(self, figure: str, **facts: Any) -> None:
        self.figures.append({"figure": figure, **facts})
        print(json.dumps(self.figures[-1]), flush=True)
        if self._path is not None:
            beside = self._path.with_suffix(".part")
            beside.write_text(json.dumps({**self._head, "figures": self.figures}, indent=1) + "\n", encoding="utf-8")
            beside.replace(self._path)

    @property
    def failed(self) -> bool:
        return any("failed" in each or each.get("passed") is False for each in self.figures)

    @contextmanager
    def stage(self, name: str, **facts: Any) -> Iterator[None]:
        """Say how long it took, whether or not it comes to its end."""
        compiled = _Compiled()
        start = time.perf_counter()
        try:
            with compiled.listening():
                yield
        finally:
            self.say("stage", stage=name, **facts, seconds=round(time.perf_counter() - start, 2), **compiled.facts())


class _Compiled:
    """What Triton was asked for."""

    def __init__(self) -> None:
        self._made = self._found = 0
        self._seconds = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        from triton import knobs

        before, knobs.compilation.listener = knobs.compilation.listener, self._note
        try:
            yield
        finally:
            knobs.compilation.listener = before

    def _note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self._found += 1
        else:
            self._made += 1
            self._seconds += times.total / 1e6

    def facts(self) -> dict[str, Any]:
        return {"compiled": self._made, "compile_seconds": round(self._seconds, 2), "found_compiled": self._found}
