"""What does a GGUF file hold, in Hugging Face's names, shapes and row order?

Needs the `gguf` package, and only when such a file is opened.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.models.digest import Progress, files_digest
from kernels.models.weights import BadWeights, gguf_file

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),  # Mistral files call themselves llama too
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_INTERLEAVED = ("llama", "mistral")
"""Their q and k rows are stored in (even, odd) RoPE pairs; Hugging Face keeps the two halves apart."""

_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufWeights:
    """One memory-mapped GGUF file; a tensor is dequantised each time it is asked for.

    Quantised tensors come back as fp32, the exact value of the quantised form; F32, F16 and BF16 as they are.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self._progress = progress
        self._gguf = _import_gguf()
        self._reader = _open(self._gguf, path)
        self.metadata: dict[str, Any] = {key: field.contents() for key, field in self._reader.fields.items()}
        """Every key of the file's header, tokenizer included, as plain Python values."""
        self._arch = _architecture(self.metadata, path)
        self._tensors = self._named_tensors()

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape as Hugging Face has it: [out, in] for a projection."""
        return tuple(reversed(self._tensors[name].shape.tolist()))

    def tensor(self, name: str) -> Tensor:
        stored = self._tensors[name]
        kind = stored.tensor_type.name
        if kind in {"F32", "F16"}:
            values = torch.from_numpy(stored.data)
        elif kind == "BF16":
            values = torch.from_numpy(stored.data.view(np.int16)).view(torch.bfloat16)
        else:
            values = torch.from_numpy(self._gguf.quants.dequantize(stored.data, stored.tensor_type))
        values = values.reshape(self.shape(name))
        if self._arch in _INTERLEAVED and (heads := self._rotated_heads(name)):
            return _split_halves(values, heads)
        return values

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of the file's contents."""
        return files_digest([self.path], self._progress)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json would say of this model."""
        get = _Fields(self.metadata, self._arch, self.path)
        hidden, heads = get.integer("embedding_length"), get.integer("attention.head_count")
        architecture, model_type = _ARCHITECTURES[self._arch]
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": get.integer("feed_forward_length"),
            "num_hidden_layers": get.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get.integer("attention.head_count_kv", heads),
            "head_dim": get.integer("attention.key_length", hidden // heads),
            "hidden_act": "silu",
            "max_position_embeddings": get.integer("context_length"),
            "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": get.number("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
            "torch_dtype": "float32",
        }

    def _named_tensors(self) -> dict[str, Any]:
        """The file's tensors under their Hugging Face names; one error lists everything that has no place there."""
        named: dict[str, Any] = {}
        wrong: list[str] = []
        for stored in self._reader.tensors:
            name = _hf_name(stored.name)
            if stored.name == "rope_freqs.weight":
                wrong.append(
                    "it scales RoPE by a stored table (Llama 3.1 and later); use the safetensors folder instead"
                )
            elif name is None:
                wrong.append(f"tensor {stored.name} belongs to no dense {self._arch} model")
            elif stored.tensor_type.name not in _TYPES:
                wrong.append(f"tensor {stored.name} is {stored.tensor_type.name}, which is none of {', '.join(_TYPES)}")
            else:
                named[name] = stored
        scaling = self.metadata.get(f"{self._arch}.rope.scaling.type", "none")
        if scaling != "none":
            wrong.append(f"it asks for {scaling} RoPE scaling; use the safetensors folder instead")
        if "model.embed_tokens.weight" not in named:
            wrong.append("tensor token_embd.weight is missing")
        if wrong:
            raise BadWeights(self.path, wrong)
        return named

    def _rotated_heads(self, name: str) -> int:
        """How many heads the rows of this tensor belong to, if RoPE turns them; else 0."""
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0


def gguf_config(path: Path) -> dict[str, Any]:
    """The config.json that a GGUF file, or the one in a folder, would have; BadWeights if it is no model we know.

    Who holds the opened GgufWeights already asks its `config`: parsing a large header takes seconds.
    """
    return GgufWeights(gguf_file(path) or path).config


class _Fields:
    """Reads `<arch>.<name>` numbers, naming the file when one is missing."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, path: Path) -> None:
        self._metadata = metadata
        self._arch = arch
        self._path = path

    def number(self, name: str, default: float | None = None) -> float:
        # GGUF stores fp32; the shortest decimal that reads back as the same fp32 is what the author wrote (1e-05).
        return float(str(np.float32(self._value(name, default))))

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self._value(name, default))

    def _value(self, name: str, default: float | None) -> float:
        value = self._metadata.get(f"{self._arch}.{name}", default)
        if not isinstance(value, int | float):
            raise BadWeights(self._path, [f"{self._arch}.{name} is {value!r}, not one number for all layers"])
        return value


def _split_halves(values: Tensor, heads: int) -> Tensor:
    """Rows of each head from (even, odd) pairs to first half, second half."""
    rows = values.shape[0]
    return values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape).contiguous()


def _hf_name(stored: str) -> str | None:
    if stored in _OUTER:
        return _OUTER[stored]
    found = _BLOCK_NAME.fullmatch(stored)
    if not found or found[2] not in _INNER:
        return None
    return f"model.layers.{found[1]}.{_INNER[found[2]]}.{found[3]}"


def _architecture(metadata: Mapping[str, Any], path: Path) -> str:
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise BadWeights(path, [f"architecture {arch!r} is none of {', '.join(_ARCHITECTURES)}"])
    if metadata.get(f"{arch}.expert_count"):
        raise BadWeights(path, ["it is a mixture of experts; only dense models are read from GGUF"])
    return str(arch)


def _open(gguf: Any, path: Path) -> Any:  # gguf ships no types
    try:
        return gguf.GGUFReader(path, "c")  # copy on write: torch wants memory it could write to
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise BadWeights(path, [f"not a complete GGUF file: {error}"]) from error


def _import_gguf() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise ModuleNotFoundError(
            "reading a GGUF file needs the gguf package: pip install 'gguf>=0.19' (or pass a safetensors folder)"
        ) from error
