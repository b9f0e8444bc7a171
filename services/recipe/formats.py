"""Which form may a request ask of its answer, in OpenAI's words and two of our own?"""

import re
from typing import Any

from services.recipe.constraint import Format
from services.recipe.fields import Fields

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KINDS = '"text", "json_object", "json_schema", "regex" or "grammar"'


def read_format(fields: Fields, field: str) -> Format:
    """Return the format in `field`, text when it is absent; raise a 400 naming what is wrong.

    Beyond OpenAI: {"type": "regex", "pattern": ...} and {"type": "grammar", "grammar": Lark or GBNF}. Whether schema,
    pattern and grammar can be obeyed is seen when they are compiled.
    """
    given = fields.take(field)
    if given is None:
        return Format()
    if not isinstance(given, dict):
        raise fields.wrong(field, "must be an object with type")
    asked = Fields(given, fields.name(field))
    match asked.take("type"):
        case "text":
            read = Format()
        case "json_object":
            read = Format("json_object", field=asked.name("type"))
        case "json_schema":
            read = read_named_schema(asked.take("json_schema"), asked.name("json_schema"))
        case "regex":
            read = Format("regex", asked.take("pattern"), asked.name("pattern"))
        case "grammar":
            read = Format("grammar", asked.take("grammar"), asked.name("grammar"))
        case _:
            raise asked.wrong("type", f"must be {_KINDS}")
    asked.finish()
    return read


def read_named_schema(given: Any, where: str) -> Format:
    """Return a JSON schema with its name. It is obeyed as written whether `strict` is true or not."""
    named = Fields(given if isinstance(given, dict) else {}, where)
    name = named.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise named.wrong("name", "must be 1 to 64 letters, digits, underscores and dashes")
    named.text("description")
    named.flag("strict")
    schema = named.take("schema")
    if not isinstance(schema, dict):
        raise named.wrong("schema", "must be a JSON schema")
    named.finish()
    return Format("json_schema", schema, named.name("schema"))
