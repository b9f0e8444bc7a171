"""Which tokenizer.json does a GGUF file's header describe?

Built in about a second from the header alone; loading the same file through transformers takes most of a minute.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL = 3
"""Token type of GGUF: never part of ordinary text."""
_USER_DEFINED = 4

_DIGITS_ONE_BY_ONE = frozenset({"smollm"})
_KNOWN = frozenset({"smollm", "gpt-2"})


def build_tokenizer(header: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE with exactly the header's ids; control tokens become special added tokens.

    A byte that is no token of its own (SmolLM2 lacks 21, nearly all invalid in UTF-8) encodes to nothing.
    Raises ValueError when the header describes another kind of tokenizer.
    """
    kind, pre = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _KNOWN:
        raise ValueError(
            f"tokenizer is {kind!r} with pre-tokenizer {pre!r}; gpt2 with one of {sorted(_KNOWN)} can be built"
        )
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{len(tokens) - len(vocabulary)} tokens of the header are spelled twice")

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS_ONE_BY_ONE else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, split])
    tokenizer.decoder = decoders.ByteLevel()

    types: list[int] = header["tokenizer.ggml.token_type"]
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in {_CONTROL, _USER_DEFINED}:
            special = type_ == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def tokenizer_config(header: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """What tokenizer_config.json says: chat template and special tokens. max_tokens: the model's context."""
    tokens: list[str] = header["tokenizer.ggml.tokens"]

    def spelled(name: str) -> str | None:
        id_ = header.get(f"tokenizer.ggml.{name}_token_id")
        return None if id_ is None else tokens[id_]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": header.get("tokenizer.chat_template"),
        "bos_token": spelled("bos"),
        "eos_token": spelled("eos"),
        "unk_token": spelled("unknown"),
        "pad_token": spelled("padding"),
        "add_bos_token": bool(header.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
