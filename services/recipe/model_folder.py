"""What does the recipe know about the model it speaks for? All of it is read once, from the model's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.recipe.encode import Encoder
from services.recipe.refusals import ModelFolderError
from services.recipe.template import load_template
from services.recipe.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's text side. context_tokens: longest prompt plus answer; vocab_tokens: width of its logits."""

    name: str
    tokenizer: PromptTokenizer
    encoder: Encoder
    context_tokens: int
    vocab_tokens: int
    eos_token_ids: tuple[int, ...]


def load_model(folder: Path, name: str = "") -> ServedModel:
    """Read `folder`; raise ModelFolderError when it cannot serve.

    name: what callers ask for; empty takes "name" of the folder's fathom.json, else the folder's own name.
    """
    config = _read(folder / "config.json", is_required=True)
    tokenizer_config = _read(folder / "tokenizer_config.json")
    tokenizer = PromptTokenizer.load(folder)
    text_config = config.get("text_config") or config
    context_tokens = text_config.get("max_position_embeddings")
    if not isinstance(context_tokens, int):
        raise ModelFolderError(f"{folder / 'config.json'} has no max_position_embeddings")
    return ServedModel(
        name=name or str(_read(folder / "fathom.json").get("name") or folder.resolve().name),
        tokenizer=tokenizer,
        encoder=Encoder(tokenizer, load_template(folder, tokenizer_config)),
        context_tokens=context_tokens,
        vocab_tokens=int(text_config.get("vocab_size") or tokenizer.num_tokens),
        eos_token_ids=_eos_ids(_read(folder / "generation_config.json"), text_config),
    )


def _eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end an answer: generation_config.json's and config.json's, each an int or a list."""
    found: set[int] = set()
    for config in configs:
        given = config.get("eos_token_id")
        found.update(given if isinstance(given, list) else [] if given is None else [given])
    return tuple(sorted(found))


def _read(path: Path, *, is_required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if is_required:
            raise ModelFolderError(f"{path} is missing")
        return {}
    try:
        read = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as exc:
        raise ModelFolderError(f"{path} is no JSON: {exc}") from exc
    if not isinstance(read, dict):
        raise ModelFolderError(f"{path} must hold a JSON object")
    return read
