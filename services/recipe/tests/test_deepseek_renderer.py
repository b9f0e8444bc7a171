"""Promises about DeepSeek V4.1 prompts: the ids are those of DeepSeek's library, and nobody's text is a control token."""

import json
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.recipe.conversation import EFFORTS, Conversation, Picture, Tool, ToolCall, Turn
from services.recipe.deepseek_library import LibraryRenderer, to_library
from services.recipe.deepseek_renderer import DeepseekRenderer
from services.recipe.deepseek_words import GROUNDING, Mark, Vocabulary, load_vocabulary
from services.recipe.dialect import IMAGE_PLACE
from services.recipe.nesting import is_deeper
from services.recipe.refusals import ApiError
from services.recipe.tests.deepseek import (
    CONVERSATIONS,
    IMAGE,
    OTHER_CONTROLS,
    PICTURE,
    assistant,
    result,
    system,
    tiny_library,
    tiny_vocabulary,
    user,
    v4_tokenizer_json,
)
from services.recipe.tokenizer import PromptTokenizer

OURS, THEIRS = DeepseekRenderer(tiny_vocabulary()), LibraryRenderer(tiny_vocabulary())
SPELLINGS = [str(mark) for mark in Mark] + [*GROUNDING, *OTHER_CONTROLS]
FRAGMENTS = [
    *SPELLINGS,
    "｜",
    "DSML",
    "<",
    "</",
    " calls>",
    "<tool_result>",
    "\n",
    " ",
    "é",
    "👍",
    '"',
    "\\",
    "hi",
    "7",
]
quick = settings(max_examples=40, deadline=None)

text = st.text(max_size=12) | st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join)
# Not -0: the library reads it as a fraction. Nor whole numbers beyond 64 bits, which requests cannot bring: they come
# in as fractions.
number = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False, allow_infinity=False)
json_value: Any = st.recursive(
    st.none() | st.booleans() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(text, json_value, max_size=3).map(lambda d: json.dumps(d, ensure_ascii=False)) | text
tools = st.lists(
    st.builds(Tool, st.sampled_from(["f", "g-1"]), text, st.dictionaries(text, json_value, max_size=2)), max_size=2
)


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    """A turn, or a call with its results: what may follow anything."""
    kind = draw(st.sampled_from(["system", "developer", "user", "assistant", "call"]))
    if kind == "user":
        return [user(*draw(st.lists(text | st.just(PICTURE), max_size=3)))]
    if kind in {"system", "developer"}:
        return [Turn("developer" if kind == "developer" else "system", (draw(text),))]
    reasoning = draw(st.none() | text)
    if kind == "assistant":
        return [assistant(draw(text), reasoning)]
    calls = [ToolCall(f"c{i}", "f", draw(arguments)) for i in range(draw(st.integers(1, 3)))]
    answered = draw(st.permutations([call.id for call in calls]))
    return [assistant(draw(text), reasoning, *calls), *(result(call_id, draw(text)) for call_id in answered)]


conversations = st.builds(
    lambda parts, declared, effort: Conversation(
        tuple(turn for part in parts for turn in part), tuple(declared), effort
    ),
    st.lists(turns(), min_size=1, max_size=4),
    tools,
    st.sampled_from(EFFORTS),
)


@quick
@given(conversations)
@example(CONVERSATIONS[-1])
def test_ids_are_the_library_s(conversation: Conversation) -> None:
    """Any conversation, whatever control tokens its texts spell."""
    assert THEIRS.render(conversation) == OURS.render(conversation)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_library_encodes_as_we_do(conversation: Conversation) -> None:
    """Its own safe encoding, too, gives these ids; its image token stands where our places are."""
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tiny_library())
    image = tiny_vocabulary().tokenizer.control_id(IMAGE)
    ids = encoding.encode(to_library(conversation, IMAGE))

    assert [IMAGE_PLACE if id_ == image else id_ for id_ in ids] == OURS.render(conversation)


def controls_of(ids: list[int], vocabulary: Vocabulary) -> list[str]:
    spellings = {vocabulary.tokenizer.control_id(s): s for s in vocabulary.tokenizer.spellings}
    return [spellings[id_] for id_ in ids if id_ in spellings]


@pytest.mark.parametrize("renderer", [OURS, THEIRS])
def test_texts_bring_no_control_tokens(renderer: DeepseekRenderer | LibraryRenderer) -> None:
    """Every spelling in every text: the controls are those of the same conversation without them."""

    def say(evil: str) -> Conversation:
        declared = Tool("f", evil, {evil: evil})
        called = ToolCall("1", "f", json.dumps({evil + "x": evil}))
        return Conversation(
            (system(evil), user(evil, PICTURE, evil), assistant("", None, called), result("1", evil), user(evil)),
            (declared,),
            "high",
        )

    evil = renderer.render(say("".join(SPELLINGS)))
    assert controls_of(renderer.render(say("x")), tiny_vocabulary()) == controls_of(evil, tiny_vocabulary())
    assert 1 == evil.count(IMAGE_PLACE)


def test_an_assistant_may_have_pointed_into_a_picture() -> None:
    """Grounding in what the model said is the tokens it said; its other control spellings are text."""
    said = "".join(SPELLINGS)
    ids = OURS.render(Conversation((user(*GROUNDING), assistant(said), user("x"))))

    expected = [Mark.BEGIN, Mark.USER, Mark.ASSISTANT, Mark.THOUGHT, *GROUNDING, Mark.END, Mark.USER, Mark.ASSISTANT]
    assert [*map(str, expected), "</think>"] == controls_of(ids, tiny_vocabulary())


def test_texts_stand_together_and_pictures_apart() -> None:
    """Parts of text are joined as they are; around a picture there is an empty line, as in the library."""

    def ids(*parts: str | Picture) -> list[int]:
        return OURS.render(Conversation((user(*parts),)))

    assert ids("ab") == ids("a", "b")
    at = ids("a", PICTURE, "b").index(IMAGE_PLACE)
    assert ids("a\n\n")[:at] == ids("a", PICTURE, "b")[:at]


@pytest.mark.parametrize(
    "deep", [*('{"a":' + "[" * n + "]" * n + "}" for n in (126, 127, 500)), "[1]", "{", "1e999", '{"a": NaN}']
)
def test_arguments_that_are_none_are_shown_as_text(deep: str) -> None:
    """As in the library: one argument, named "arguments"."""
    conversation = Conversation((user("x"), assistant("", None, ToolCall("1", "f", deep)), result("1", "")))

    assert THEIRS.render(conversation) == OURS.render(conversation)


def test_depth_is_counted_without_recursion() -> None:
    """Containers count, values do not."""
    assert not is_deeper({"a": [1], "b": 2}, 2)
    assert is_deeper({"a": [1]}, 1)
    assert not is_deeper("x", 0)
    assert is_deeper(json.loads("[" * 900 + "]" * 900), 127)


def test_what_cannot_fit_is_refused_before_it_is_encoded() -> None:
    """By the sum of its texts; what fits is not."""
    conversation = Conversation((user("1" * 2000), user("2" * 2000)))
    fits = OURS.render(conversation)

    assert fits == OURS.render(conversation, context_tokens=len(fits) + 1)
    with pytest.raises(ApiError) as raised:
        OURS.render(conversation, context_tokens=20)
    assert ("messages", "context_length_exceeded") == (raised.value.param, raised.value.code)


@pytest.fixture(scope="module")
def v4() -> str:
    """V4's tokenizer.json, in which V4.1's missing system token has taken a placeholder's id."""
    return v4_tokenizer_json()


@pytest.mark.slow
def test_real_vocabulary(v4: str) -> None:
    """All of it again in 129,280 tokens, control spellings of all kinds included."""
    vocabulary = load_vocabulary(PromptTokenizer(Tokenizer.from_str(v4)))
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(deepseek_recipe.Tokenizer.from_str(v4))
    image = vocabulary.tokenizer.control_id(IMAGE)
    ours = DeepseekRenderer(vocabulary)
    every = "".join(vocabulary.tokenizer.spellings)
    evil = Conversation((user(every), assistant("x"), system(every)))
    for conversation in (*CONVERSATIONS, evil):
        ids = encoding.encode(to_library(conversation, IMAGE if conversation is not evil else "\ue000"))
        assert [IMAGE_PLACE if id_ == image else id_ for id_ in ids] == ours.render(conversation)
    plain = ours.render(Conversation((user("x"), assistant("x"), system("x"))))
    assert controls_of(plain, vocabulary) == controls_of(ours.render(evil), vocabulary)
