"""What may a request say about who asks, and why? All of it is checked, some repeated, and none changes the answer."""

from typing import Any

from services.recipe.fields import Fields

MAX_PAIRS = 16
MAX_KEY_CHARACTERS = 64
MAX_TEXT_CHARACTERS = 512
SERVICE_TIER = "default"
"""The only one: the tier that answers report."""


def read_metadata(fields: Fields) -> dict[str, str]:
    """Return `metadata`: a few pairs of short strings."""
    given = fields.take("metadata")
    if given is None:
        return {}
    rule = f"must be an object of at most {MAX_PAIRS} strings of at most {MAX_TEXT_CHARACTERS} characters"
    if not isinstance(given, dict) or len(given) > MAX_PAIRS:
        raise fields.wrong("metadata", rule)
    for key, value in given.items():
        if len(key) > MAX_KEY_CHARACTERS or not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
            raise fields.wrong("metadata", f"{rule}, with keys of at most {MAX_KEY_CHARACTERS}")
    return given


def read_identity(fields: Fields) -> dict[str, Any]:
    """Return `metadata`, the user by the three names it has, and the service tier that there is."""
    told: dict[str, Any] = {"metadata": read_metadata(fields)}
    for field in ("user", "safety_identifier", "prompt_cache_key"):
        text = fields.text(field)
        if text is not None and len(text) > MAX_TEXT_CHARACTERS:
            raise fields.wrong(field, f"must have at most {MAX_TEXT_CHARACTERS} characters")
        told[field] = text
    if fields.take("service_tier") not in (None, "auto", "default"):
        raise fields.wrong("service_tier", 'must be "auto" or "default": there are no others here')
    return told | {"service_tier": SERVICE_TIER}
