"""How deeply nested is a JSON value? Asked before anything recursive touches it."""

from collections.abc import Iterable
from typing import Any


def is_deeper(value: Any, limit: int) -> bool:
    """Return whether objects and lists nest more than `limit` levels."""
    level, depth = _containers([value]), 0
    while level:
        depth += 1
        if depth > limit:
            return True
        level = _containers(
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
        )
    return False


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]
