"""How does a GGUF file become a Hugging Face folder?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class MissingPackage(Exception):  # noqa: N818 - named by meaning, like the service errors
    """A package that only the conversion needs is not installed."""


def convert(gguf: Path, folder: Path, report: Callable[[str, int, int], None]) -> None:
    """Write weights, config and tokenizer of a GGUF file into an existing folder. report: (stage, done, total).

    Weights are stored as fp32: a dequantised value (fp16 scale times integer, plus fp16 minimum) needs more bits than
    bf16 or fp16 have, and this folder is what independent references load.
    """
    report("read header", 0, 1)
    try:
        from safetensors.torch import save_file

        from kernels.models.weights_gguf import GgufWeights
        from services.local.tokenizer_file import build_tokenizer, tokenizer_config

        weights = GgufWeights(gguf)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"converting the model needs more packages ({error}): pip install 'fathom[all]'"
        ) from error
    header, config = weights.metadata, weights.config
    build_tokenizer(header).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(header, config["max_position_embeddings"]))
    write_json(folder / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    special["pad_token_id"] = header.get("tokenizer.ggml.padding_token_id")
    write_json(folder / "generation_config.json", special)

    names = weights.names()
    tensors = {}
    for done, name in enumerate(names):
        report("convert weights", done, len(names))
        tensors[name] = weights.tensor(name).float()
    report("convert weights", len(names), len(names))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library makes it private; services may run as another user


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write readable JSON."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
