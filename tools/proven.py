"""Which fast tests cannot have changed since they last passed?

A test is named by a digest of all that it can depend on: the modules that it imports, directly or not, and the files
that are not Python. Those that passed under the same digest, in the same environment, need not run again.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from tools.sizes import SKIP

ROOT = Path(__file__).resolve().parent.parent
LEDGER = Path(sys.prefix) / "fast-tests.json"
"""Beside the packages that the tests ran with: a new environment has proven nothing yet."""

EVERYTHING = ("tools", "k8s", "proto", "services/chassis", "services/local")
"""Tests here start other programs of the project, or read its files: they depend on all there is."""
_UNREAD = {".md", ".svg"}
"""Pages: only tests that name one, and those above, can depend on them."""
_CACHES = SKIP | {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache"}
_LEFT_BEHIND = {".fathom-digest.json"}
"""What a program that has read weights leaves beside them, tests too: no test depends on it."""
_DOTTED = re.compile(r"[a-z_]\w*(\.\w+)+")


class Tree:
    """The files of the repository as they are now."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._files = sorted(_files(root))
        self._digests = {name: sha256((root / name).read_bytes()).digest() for name in self._files}
        self._imports: dict[str, frozenset[str]] = {}

    def tests(self, folders: Sequence[str]) -> list[str]:
        """Return the test files in `folders`, less those in folders given as --ignore=FOLDER."""
        ignored = [each.removeprefix("--ignore=") for each in folders if each.startswith("--ignore=")]
        asked = [each for each in folders if not each.startswith("--")]
        return [
            name
            for name in self._files
            if Path(name).match("test_*.py") and _is_in(name, asked) and not _is_in(name, ignored)
        ]

    def digest(self, test: str) -> str:
        """Return the name of all that a test file can depend on."""
        # Some tests compare with files beside the checkout, and skip where those are absent.
        digest = sha256(f"{sys.version} {(self._root.parent / 'shared').exists()}".encode())
        for name in self._needs(test):
            digest.update(name.encode() + b"\0" + self._digests[name])
        return digest.hexdigest()

    def _needs(self, test: str) -> list[str]:
        if _is_in(test, EVERYTHING):
            return self._files
        seen: set[str] = set()
        waiting = {test, *self._conftests(test)}
        while waiting:
            name = waiting.pop()
            seen.add(name)
            waiting |= self._imported(name) - seen
        reads_pages = ".md" in (self._root / test).read_text(encoding="utf-8")
        data = (
            name
            for name in self._files
            if not name.endswith((".py", ".pyi")) and (reads_pages or Path(name).suffix not in _UNREAD)
        )
        return sorted(seen.union(data))

    def _conftests(self, test: str) -> Iterable[str]:
        return (name for folder in Path(test).parents if (name := str(folder / "conftest.py")) in self._digests)

    def _imported(self, name: str) -> frozenset[str]:
        known = self._imports.get(name)
        if known is None:
            found = _named_modules((self._root / name).read_text(encoding="utf-8"))
            known = self._imports[name] = frozenset(file for module in found for file in self._files_of(module))
        return known

    @cache  # noqa: B019 - a tree lives as long as the program
    def _files_of(self, module: str) -> tuple[str, ...]:
        """Return the files that importing `a.b.c` runs; c may also be a name inside of a.b."""
        words = module.split(".")
        places = ["/".join(words[:end]) for end in range(1, len(words) + 1)]
        names = (f"{place}{end}" for place in places for end in (".py", "/__init__.py", "/__main__.py"))
        return tuple(name for name in names if name in self._digests)


def unproven(tree: Tree, tests: Sequence[str]) -> list[str]:
    """Return those of `tests` that have to run."""
    known = _read()
    return [test for test in tests if known.get(test) != tree.digest(test)]


def passed(tree: Tree, tests: Sequence[str]) -> None:
    """Note that these passed, as they were when `tree` was read."""
    known = _read() | {test: tree.digest(test) for test in tests}
    LEDGER.with_suffix(".new").write_text(json.dumps(known, indent=0, sort_keys=True), encoding="utf-8")
    LEDGER.with_suffix(".new").replace(LEDGER)


def _read() -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads(LEDGER.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known


def _files(root: Path) -> Iterable[str]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(each for each in set(inner) - _CACHES if not each.endswith(".egg-info"))
        for name in sorted(set(names) - _LEFT_BEHIND):
            yield str(Path(folder, name).relative_to(root))


def _is_in(name: str, folders: Iterable[str]) -> bool:
    return any(Path(name).is_relative_to(folder) for folder in folders)


def _named_modules(source: str) -> set[str]:
    """Return what a file imports; words with dots count too, for some modules are started by their names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            found.add(node.value)
    return found
