"""Is every word of every `--help` there to be read on a terminal of 80 columns?"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from services.local import kv
from services.local.commands import app
from services.local.guide import GUIDE, UP_EPILOG

COLUMNS = 80
EXAMPLES = [
    *re.findall(r"\[bold\](fathom [^\[]+)\[/\]", GUIDE),
    "http://127.0.0.1:8000/v1",
    *(line for line in UP_EPILOG.splitlines() if line.startswith("  ")),
]


def commands(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group below this one, with the words that name it."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *words, name)


if "kv" not in {group.name for group in app.registered_groups}:
    app.add_typer(kv.app, name="kv")  # as `fathom` itself does
EVERY = dict(commands(get_command(app)))


def shown(words: tuple[str, ...]) -> list[str]:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(COLUMNS), "TERM": "xterm"})
    assert 0 == result.exit_code, result.output
    return result.output.splitlines()


def promised(command: Any) -> Iterator[str]:
    """What a help must hold, word by word: the command's own help, and its parameters' names, forms and help."""
    texts = [command.help, command.epilog]
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        texts += [*(name for name in names if name.startswith("-")), parameter.metavar, parameter.help]
    texts += [inner.short_help or inner.help for inner in getattr(command, "commands", {}).values()]
    for text in filter(None, texts):
        # Not by rich: brackets that it takes for markup would be missed on neither side.
        yield from re.sub(r"\[/?(bold)?\]", "", text).replace("\\[", "[").split()


@pytest.mark.parametrize("words", EVERY, ids=lambda words: " ".join(words) or "fathom")
def test_no_word_of_a_help_is_cut(words: tuple[str, ...]) -> None:
    """Neither an option nor an example, an address or the name of a setting."""
    lines = shown(words)
    read = {word for line in lines for word in line.split()}

    assert [] == [line for line in lines if len(line) > COLUMNS or "…" in line]
    assert [] == [word for word in promised(EVERY[words]) if word not in read]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_stands_in_one_line(example: str) -> None:
    """It can be read at a glance, and pasted."""
    assert any(example in line for words in ((), ("up",)) for line in shown(words))
