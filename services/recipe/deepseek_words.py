"""Which words does the prompt format of DeepSeek V4.1 consist of?

All of them were taken from what the deepseek-recipe library renders, and tests compare the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.recipe.tokenizer import PromptTokenizer


class Mark(StrEnum):
    """Control tokens that give a conversation its structure, by spelling."""

    BEGIN = "<｜begin▁of▁sentence｜>"  # noqa: RUF001 - full-width bars are how these tokens are written
    END = "<｜end▁of▁sentence｜>"  # noqa: RUF001 - as above
    SYSTEM = "<｜System｜>"  # noqa: RUF001 - as above
    USER = "<｜User｜>"  # noqa: RUF001 - as above
    ASSISTANT = "<｜Assistant｜>"  # noqa: RUF001 - as above
    THINK = "<think>"
    THOUGHT = "</think>"
    DSML = "｜DSML｜"  # noqa: RUF001 - as above


GROUNDING = tuple(f"<｜{slash}{word}｜>" for word in ("ref", "box", "point", "polygon") for slash in ("", "/"))  # noqa: RUF001 - as above
"""With these a model points into a picture. In what it said earlier they are the tokens it said."""

_TABLES = ("<｜table｜>", "<｜/table>｜", "<｜tr｜>", "<｜/tr｜>", "<｜td｜>", "<｜/td｜>")  # noqa: RUF001 - as above

EFFORT = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
DEFAULT_EFFORT = "high"

RESULT_BEGIN, RESULT_END = "<tool_result>", "</tool_result>"  # plain text, not tokens

TOOLS_BEGIN = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{Mark.DSML} calls>" block like the following:

<{Mark.DSML} calls>
<{Mark.DSML} invoke name="$TOOL_NAME">
<{Mark.DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{Mark.DSML} parameter>
...
</{Mark.DSML} invoke>
<{Mark.DSML} invoke name="$TOOL_NAME2">
...
</{Mark.DSML} invoke>
</{Mark.DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501 - the model's own lines
TOOLS_END = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


def effort_line(effort: str) -> str:
    """Return the line that tells the model how hard to think."""
    return (
        f"Reasoning Effort: {EFFORT[effort]} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The format's words in one model's tokens."""

    tokenizer: PromptTokenizer
    ids: Mapping[str, int]
    """Of marks and, where the model has them, grounding tokens."""
    marks: Mapping[int, Mark]
    pieces: Sequence[bytes]
    """What each id adds to an answer. Control tokens add nothing, but grounding and tables are what was asked for."""


def missing_marks(tokenizer: PromptTokenizer) -> list[str]:
    """Return the spellings without which the format cannot be written."""
    return [mark.value for mark in Mark if tokenizer.control_id(mark) is None]


def load_vocabulary(tokenizer: PromptTokenizer) -> Vocabulary:
    """Return the format's words in the tokens of `tokenizer`, which must have all marks."""
    found = {spelling: tokenizer.control_id(spelling) for spelling in (*Mark, *GROUNDING)}
    ids = {str(spelling): id_ for spelling, id_ in found.items() if id_ is not None}
    pieces = list(tokenizer.pieces)
    for spelling in tokenizer.spellings:
        id_ = tokenizer.control_id(spelling)
        assert id_ is not None
        pieces[id_] = spelling.encode() if spelling in {*GROUNDING, *_TABLES} else b""
    return Vocabulary(tokenizer, ids, {ids[mark]: mark for mark in Mark}, tuple(pieces))
