"""How are a config.json's fields read so that everything wrong with them is told at once?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kernels.models.config import ModelNotSupported

Number = TypeVar("Number")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelNotSupported when there is none."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotSupported(f"{path} does not exist; a Hugging Face model folder has one") from None
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelNotSupported(f"{path} is not a JSON object")
    return parsed


class Fields:
    """One section of config.json; what is wrong with it is collected so that all of it is told at once."""

    def __init__(self, raw: Any, where: str, problems: list[str]) -> None:
        self._where, self._problems = where, problems
        self._raw: Mapping[str, Any] = raw if isinstance(raw, dict) else {}
        if not isinstance(raw, dict):
            problems.append(f"{where} is missing")

    def whole(self, name: str, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return self._wrong(name, f"a whole number >= {least}", least)
        return value

    def number(self, name: str) -> float:
        """A positive number."""
        value = self._raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            return self._wrong(name, "a positive number", 1.0)
        return float(value)

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._raw.get(name)
        if not isinstance(value, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in value):
            return self._wrong(name, "a list of whole numbers", ())
        return tuple(value)

    def must_be(self, name: str, supported: object, *, default: object = None) -> None:
        """Refuse other values of what changes the computation."""
        value = self._raw.get(name, default)
        if value != supported:
            self._problems.append(f"{self._where}.{name} is {value!r}: only {supported!r} is supported")

    def section(self, name: str) -> Fields:
        """A nested object."""
        return Fields(self._raw.get(name), f"{self._where}.{name}", self._problems)

    def get(self, name: str) -> Any:
        """As it is in the file; None where it is not."""
        return self._raw.get(name)

    def _wrong(self, name: str, wanted: str, instead: Number) -> Number:
        self._problems.append(f"{self._where}.{name} is {self._raw.get(name)!r}, not {wanted}")
        return instead
