"""A tokenizer for the tiny model: one printable ASCII character for each id from 3 on."""

import json
from pathlib import Path

EOS, FIRST = 2, 3
CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in "`~")


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and return its path."""
    specials = ["<pad>", "<bos>", "<eos>"]
    # Byte-level vocabularies spell a space as U+0120.
    vocab = {text.replace(" ", "\u0120"): at for at, text in enumerate([*specials, *CHARACTERS])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    path = folder / "tokenizer.json"
    described = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": text, **flags} for at, text in enumerate(specials)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    path.write_text(json.dumps(described), encoding="utf-8")
    return path


def text_of(token_ids: list[int]) -> str:
    """What the tokens say; the end token says nothing."""
    return "".join(CHARACTERS[token_id - FIRST] for token_id in token_ids if token_id != EOS)
