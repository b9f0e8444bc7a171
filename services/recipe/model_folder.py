"""What does the recipe know about the model it speaks for? All of it is read once, from the model's folder."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.chassis.images import read_rules
from services.recipe.dialect import Dialect
from services.recipe.encode import Encoder
from services.recipe.families import choose_dialect
from services.recipe.refusals import ModelFolderError
from services.recipe.schema import ModelRules
from services.recipe.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's text side. context_tokens: longest prompt plus answer."""

    name: str
    tokenizer: PromptTokenizer
    dialect: Dialect
    encoder: Encoder
    rules: ModelRules
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: bytes
    """SHA-256 of tokenizer.json: grammars name its ids."""


def load_model(folder: Path) -> ServedModel:
    """Read `folder`; raise ModelFolderError when it cannot serve.

    Callers ask for "name" of the folder's fathom.json, else the folder's own name, as the engines announce it.
    """
    config = _read(folder / "config.json", is_required=True)
    served = _read(folder / "fathom.json")
    tokenizer = PromptTokenizer.load(folder)
    text_config = config.get("text_config") or config
    context_tokens = text_config.get("max_position_embeddings")
    if not isinstance(context_tokens, int):
        raise ModelFolderError(f"{folder / 'config.json'} has no max_position_embeddings")
    try:
        image_rules = read_rules(config)
    except ValueError as exc:
        raise ModelFolderError(f"{folder / 'config.json'}: {exc}") from exc
    dialect = choose_dialect(folder, config, served.get("renderer"), _read(folder / "tokenizer_config.json"), tokenizer)
    vocab_tokens = int(text_config.get("vocab_size") or tokenizer.num_tokens)
    return ServedModel(
        name=str(served.get("name") or folder.resolve().name),
        tokenizer=tokenizer,
        dialect=dialect,
        encoder=Encoder(tokenizer, dialect, vocab_tokens=vocab_tokens, image_rules=image_rules),
        rules=ModelRules(
            vocab_tokens,
            takes_tools=dialect.takes_tools,
            takes_images=dialect.takes_images and image_rules is not None,
            default_effort=dialect.default_effort,
        ),
        context_tokens=context_tokens,
        eos_token_ids=_eos_ids(_read(folder / "generation_config.json"), config, text_config),
        tokenizer_digest=hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest(),
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
