"""The tokenizer built from a header has the header's ids, and gives every ordinary text back."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.local.tokenizer_file import build_tokenizer, tokenizer_config

TEXTS = [
    "Hello, world! It's 12345 o'clock.", "1969 3.14159 00 9", "  two  spaces\n\n\ttab\r\n", "漢字かな交じり文 한국어", "👩‍👩‍👧‍👦🎉",
    "العربية देवनागरी עברית", "def f(x):\n\treturn x ** 2", "\0\x7f", "é ñ ß ½", "", " ", "I'm we'll DON'T",
]  # fmt: skip


def byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with, in byte order."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def header(pre: str = "smollm") -> dict[str, Any]:
    """A small header: control tokens, bytes, and three merges; "12" would merge if digits stayed together."""
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "1 2", "Ġ he"]
    tokens = [*controls, *byte_letters(), *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


def test_ids_are_the_headers() -> None:
    """Every token, ordinary or control, has its place in the list as its id."""
    described = header()
    tokenizer = build_tokenizer(described)
    tokens = described["tokenizer.ggml.tokens"]

    assert len(tokens) == tokenizer.get_vocab_size()
    assert list(range(len(tokens))) == [tokenizer.token_to_id(token) for token in tokens]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back(text) -> None:
    """Spaces, digits, scripts, emoji and control characters, byte by byte."""
    tokenizer = build_tokenizer(header())

    assert text == tokenizer.decode(tokenizer.encode(text).ids)


def test_digits_stand_alone_where_the_model_was_trained_so() -> None:
    """SmolLM2 never saw two digits in one token, GPT-2 did; merges apply within words only."""
    assert ["Ġhe", "1", "2"] == build_tokenizer(header()).encode(" he12").tokens
    assert ["Ġhe", "12"] == build_tokenizer(header("gpt-2")).encode(" he12").tokens


def test_control_tokens_are_special_and_can_be_read_as_text() -> None:
    """The template's markup gets their ids; message text, encoded as text, never does."""
    tokenizer = Tokenizer.from_str(build_tokenizer(header()).to_str())

    he = tokenizer.token_to_id("he")
    assert he is not None
    assert [1, he, 2] == tokenizer.encode("<|im_start|>he<|im_end|>").ids
    assert "he" == tokenizer.decode([1, he, 2])
    tokenizer.encode_special_tokens = True
    assert {0, 1, 2}.isdisjoint(tokenizer.encode("<|im_start|>he<|im_end|>").ids)


def test_the_config_names_template_and_special_tokens() -> None:
    """A token that the header does not name is null, as in a Hugging Face folder."""
    config = tokenizer_config(header(), 8192)

    assert ("{{ messages }}", "<|im_start|>", "<|im_end|>", None, 8192) == (
        config["chat_template"], config["bos_token"], config["eos_token"], config["pad_token"], config["model_max_length"],
    )  # fmt: skip
    assert config == json.loads(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "1 tokens of the header are spelled twice"),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(change, reason) -> None:
    """Rather than giving ids that are nearly right."""
    with pytest.raises(ValueError, match=reason):
        build_tokenizer(header() | change)
