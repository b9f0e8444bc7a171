"""Promises about prompts: message text is never a control token, and otherwise the ids are the library's own."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.recipe.conversation import Conversation, Turn
from services.recipe.disguise import Disguise
from services.recipe.encode import Encoder
from services.recipe.refusals import ApiError, ModelFolderError
from services.recipe.template import ChatTemplate, load_template
from services.recipe.templated import templated
from services.recipe.tests.tiny import CHATML, SPECIAL, make_tokenizer, token_id
from services.recipe.tokenizer import PromptTokenizer

ADDED = [*SPECIAL, "<think>", "</think>"]
LIBRARY = make_tokenizer()
TOKENIZER = PromptTokenizer(make_tokenizer())


def encoder(template: ChatTemplate | None) -> Encoder:
    return Encoder(TOKENIZER, templated(TOKENIZER, template))


ENCODER = encoder(ChatTemplate(CHATML, {}))
CONTROLS = set(LIBRARY.get_added_tokens_decoder())

FRAGMENTS = [*ADDED, "<|im_", "end|>", "<|", "|>", "<", ">", "im_start", "\ue000", "\ue001", " ", "\n", "é", "👍", "12"]
text = st.text(max_size=30) | st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
quick = settings(max_examples=60, deadline=None)


def naive(prompt: str, library: Tokenizer = LIBRARY) -> list[int]:
    ids: list[int] = library.encode(prompt, add_special_tokens=False).ids
    return ids


def chatml(*contents: str) -> str:
    turns = "".join(f"<|im_start|>user\n{content.strip()}<|im_end|>\n" for content in contents)
    return turns + "<|im_start|>assistant\n"


def users(*contents: str) -> Conversation:
    return Conversation(tuple(Turn("user", (content,)) for content in contents))


def messages(*contents: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": content} for content in contents]


def chat_ids(template: ChatTemplate, conversation: Conversation) -> list[int]:
    return list(encoder(template).chat_prompt(conversation).ids)


@quick
@given(st.lists(text, min_size=1, max_size=3))
@example(["<|im_end|>"])
@example(["<|im_", "end|>"])
@example(["<", "|im_end|>"])
@example(["<<|im_end|><|im_end|>"])
@example(["\ue000<think>\ue001"])
def test_messages_bring_no_control_tokens(contents: list[str]) -> None:
    """The template's own controls, in its order, and none besides; all else decodes to what was written."""
    ids = list(ENCODER.chat_prompt(users(*contents)).ids)
    start, end = token_id(LIBRARY, "<|im_start|>"), token_id(LIBRARY, "<|im_end|>")
    spelled = b"".join(TOKENIZER.pieces[id_] or b"\0" for id_ in ids)
    shown = "".join(f"\0user\n{content.strip()}\0\n" for content in contents) + "\0assistant\n"

    assert [start, end] * len(contents) + [start] == [id_ for id_ in ids if id_ in CONTROLS]
    assert shown.encode() == spelled


@quick
@given(st.lists(text, min_size=1, max_size=3))
@example(["ends in <", "|> begins"])
def test_ordinary_messages_have_the_library_s_ids(contents: list[str]) -> None:
    """Without control spellings the ids equal the one-string encode, also where a message ends in half a spelling."""
    prompt = chatml(*contents)
    if naive(prompt).count(token_id(LIBRARY, "<|im_end|>")) != len(contents) or any(
        word in content for word in ADDED for content in contents
    ):
        return
    assert naive(prompt) == list(ENCODER.chat_prompt(users(*contents)).ids)


@quick
@given(text)
def test_plain_prompts_hold_no_control_tokens(prompt: str) -> None:
    """Text is text; without control spellings the ids are the library's."""
    ids = TOKENIZER.plain_ids(prompt)

    assert CONTROLS.isdisjoint(ids)
    assert prompt.encode() == b"".join(TOKENIZER.pieces[id_] for id_ in ids)
    if not any(word in prompt for word in ADDED):
        assert naive(prompt) == ids


@quick
@given(text)
def test_seams_of_a_template_make_no_control_tokens(content: str) -> None:
    """A template that writes "<" before and ">" after a message opens no way in."""
    template = ChatTemplate("{% for m in messages %}<{{ m.content }}>{{ m.content | trim }}{% endfor %}", {})
    ids = chat_ids(template, users(content))

    assert CONTROLS.isdisjoint(ids)
    assert f"<{content}>{content.strip()}".encode() == b"".join(TOKENIZER.pieces[id_] for id_ in ids)


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ messages[0].content | trim }}", "  a  ", "a"),
        ("{% if messages[0].content == 'ping' %}pong{% endif %}", "ping", "pong"),
        ("{{ messages[0].content.split('|')[1] }}", "a|b", "b"),
        ("{{ messages[0].content | length }}", "<think>ab", "9"),
        ("{{ messages[0].content | tojson }}", "<think>é", '"<think>é"'),
        ("{{ messages[0].content[1:] | upper }}", "x<think>", "<THINK>"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "a</think>b", "a</think>b"),
    ],
)
def test_templates_see_messages_as_they_are(template: str, content: str, expected: str) -> None:
    """They can trim, compare, split and slice; only control spellings cannot be found in a message: they are not there."""
    ids = chat_ids(ChatTemplate(template, {}), users(content))

    assert expected.encode() == b"".join(TOKENIZER.pieces[id_] for id_ in ids)
    assert CONTROLS.isdisjoint(ids)


def test_names_and_reasoning_are_covered_too() -> None:
    """Every string of a message but its role is the caller's."""
    template = ChatTemplate("{{ messages[0].name }}{{ messages[0].reasoning_content }}", {})
    turn = Turn("user", ("",), name="<think>", reasoning="<|im_end|>")

    assert CONTROLS.isdisjoint(chat_ids(template, Conversation((turn,))))


def test_messages_without_spellings_are_not_touched() -> None:
    """Nearly all are like that, and pay nothing."""
    covered = Disguise(ADDED, ()).cover(messages("hello <b>world</b>"))

    assert {} == covered.originals
    assert "hello <b>world</b>" == covered.messages[0]["content"]


def test_all_private_use_characters_taken_is_a_refusal() -> None:
    """Rather than a guess which of them are markers."""
    every = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))))
    with pytest.raises(ApiError, match="private-use"):
        Disguise(ADDED, ()).cover(messages(every + "<think>"))


def padded_library(*, prepend: str) -> Tokenizer:
    """Sentencepiece-like, with added tokens that swallow spaces, or match whole words only."""
    alphabet = sorted({*"abcdefghijklmnopqrstuvwxyz|<>_/\n", "\u2581"})
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [
            AddedToken("<s>", normalized=False),
            AddedToken("<|end|>", rstrip=True, normalized=False),
            AddedToken("<|user|>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("<|w|>", single_word=True, normalized=False),
        ]
    )
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


@pytest.mark.parametrize("prepend", ["first", "always", "never"])
@quick
@given(st.lists(st.sampled_from(["<s>", "<|end|>", "<|user|>", "<|w|>", " ", "\n", "a", "bc", "<"]), max_size=10))
def test_marked_text_is_split_as_the_library_splits_it(prepend: str, parts: list[str]) -> None:
    """Padding and whole-word flags, and the mark before a first word, come out the same."""
    marked = "".join(parts)
    library = padded_library(prepend=prepend)

    assert naive(marked, library) == PromptTokenizer(padded_library(prepend=prepend)).marked_ids(marked)


def test_a_bare_prompt_gets_what_the_model_expects() -> None:
    """BOS where the model has one, and the mark before the first word."""
    library = padded_library(prepend="first")
    ids = PromptTokenizer(padded_library(prepend="first")).plain_ids("a <s>", is_whole_prompt=True)

    assert library.encode("a").ids == ids[:3]
    assert 1 == ids.count(token_id(library, "<s>"))


def test_vocabularies_that_hold_their_controls_are_safe_too() -> None:
    """A Unigram model would spell a control by its ordinary entry."""
    letters = [(c, -5.0) for c in "abc<>/s\u2581"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", -1.0), *letters], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["</s>"])
    ids = PromptTokenizer(tokenizer).plain_ids("ab</s>c")

    assert tokenizer.token_to_id("</s>") not in ids
    assert 7 == len(ids)


def test_spellings_in_logprobs() -> None:
    """Bytes that are no character are escaped; specials, shown nowhere else, have their spelling."""
    thumb = TOKENIZER.plain_ids("👍")

    assert r"\xf0" == TOKENIZER.spelling(thumb[0])
    assert "<|im_end|>" == TOKENIZER.spelling(token_id(LIBRARY, "<|im_end|>"))
    assert "" == TOKENIZER.spelling(10**6)
    assert b"" == TOKENIZER.pieces[token_id(LIBRARY, "<|im_end|>")]


def test_templates_are_found_where_folders_keep_them(tmp_path: Path) -> None:
    """chat_template.jinja first; then a string, or the one named default."""
    named: list[Any] = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D{{ bos_token }}"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}}
    assert load_template(tmp_path, {}) is None
    found = load_template(tmp_path, config)
    assert found is not None
    assert "D<s>" == found.render([])

    (tmp_path / "chat_template.jinja").write_text("F")
    found = load_template(tmp_path, config)
    assert found is not None
    assert "F" == found.render([])


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content }}", "{{ messages.append(1) }}",
     "{{ ''.__class__.__mro__ }}", "{{ 1 + 'a' }}", "{{ nothing.here }}"],
)  # fmt: skip
def test_what_a_template_cannot_take_is_the_caller_s_fault(source: str) -> None:
    """A 400 on messages, with the template's own words where it has some; the sandbox holds."""
    with pytest.raises(ApiError) as raised:
        ChatTemplate(source, {}).render(messages("x"))

    assert (400, "messages") == (raised.value.status, raised.value.param)


def test_a_model_without_template_answers_completions_only() -> None:
    """chat_template_missing, on chat alone."""
    with pytest.raises(ApiError) as raised:
        encoder(None).chat_prompt(users("x"))

    assert (400, "chat_template_missing") == (raised.value.status, raised.value.code)


def test_a_broken_template_is_found_at_start() -> None:
    """Not at the first request."""
    with pytest.raises(ModelFolderError, match="line 1"):
        ChatTemplate("{% if %}", {})


async def test_long_texts_are_encoded_in_a_thread_with_the_same_ids() -> None:
    """Only the place differs."""
    long = "hello world " * 1000

    assert [naive(long), [7], naive("hi")] == await ENCODER.texts([long, [7], "hi"])
    assert naive(chatml(long)) == (await ENCODER.chat(users(long))).ids
    spelled = "é<|im_end|>" * 500
    assert TOKENIZER.plain_ids("é<|im_end|>") * 500 == (await ENCODER.texts([spelled]))[0]
