"""How is one field of a JSON body read, so that whatever is wrong is said by name?"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from services.recipe.refusals import ApiError, refuse

_MISSING = object()


class Fields:
    """A JSON object whose fields are taken one by one; what nobody took is refused at the end.

    null means absent, as OpenAI has it. `where` is the object's own place in the body, "" for the body itself.
    """

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self._left = dict(given)
        self._where = where

    def name(self, field: str) -> str:
        """Return the field's full name, for messages: stream_options.include_usage."""
        return f"{self._where}.{field}" if self._where else field

    def wrong(self, field: str, rule: str) -> ApiError:
        """Return the error that says which rule the field breaks."""
        return refuse(self.name(field), rule)

    def take(self, field: str) -> Any:
        """Return the field as it is, None when it is absent or null."""
        return self._left.pop(field, None)

    def flag(self, field: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "must be true or false")
        return value

    def text(self, field: str) -> str | None:
        """Return a string."""
        value = self.take(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, "must be a string")
        return value

    def integer(self, field: str, low: int, high: int) -> int | None:
        """Return an integer of low..high."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(field, f"must be an integer from {low} to {high}")
        return value

    def number(self, field: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        """Return a finite number of low..high; `above` leaves `low` itself out."""
        value = self.take(field)
        if value is None:
            return default
        if not is_number(value) or not low <= value <= high or (above and value == low):
            range_ = f"greater than {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise self.wrong(field, f"must be a number {range_}")
        return float(value)

    def integers(self, field: str, count: int, high: int) -> tuple[int, ...]:
        """Return a list of at most `count` integers of 0..high."""
        value = self.take(field)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > count:
            raise self.wrong(field, f"must be a list of at most {count} integers")
        if not all(is_id(item, high) for item in value):
            raise self.wrong(field, f"must hold integers from 0 to {high}")
        return tuple(value)

    def accept(self, fields: Iterable[str]) -> None:
        """Take fields that are allowed and change nothing."""
        for field in fields:
            self._left.pop(field, None)

    def refuse_all_but(self, neutral: Mapping[str, tuple[Any, ...]], reason: str) -> None:
        """Refuse features we do not have, unless the value asks for nothing anyway.  neutral: field -> such values."""
        for field, values in neutral.items():
            given = self._left.pop(field, _MISSING)
            if given is _MISSING or given is None:
                continue
            # The type too: to Python true and 1.0 equal 1.
            if not any(type(given) is type(value) and given == value for value in values):
                raise self.wrong(field, reason)

    def finish(self) -> None:
        """Refuse what is left and not null: a field that changes nothing would be a promise broken silently."""
        unknown = next((field for field, value in self._left.items() if value is not None), None)
        if unknown is not None:
            raise refuse(self.name(unknown[:100]), "is not a field of this request", code="unknown_parameter")


def is_number(value: object) -> bool:
    """Return whether the value is a finite number (a JSON true is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_id(value: object, high: int) -> bool:
    """Return whether the value is an integer of 0..high (a JSON true is none)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= high
