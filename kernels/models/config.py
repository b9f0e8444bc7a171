"""What does a model folder's config.json ask for, and can this library compute it?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelNotSupported(ValueError):  # noqa: N818 - named by meaning, like the service errors
    """The config asks for something this library does not compute."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_tokens: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. `factor` divides positions (linear scaling); 1 is none."""

    theta: float
    factor: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope: RopeConfig
    max_position_tokens: int
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on every query and key head before the rotation (Qwen3)."""
    eos_token_ids: tuple[int, ...] = ()

    image_token_ids: tuple[int, ...] = ()
    """None of these models takes images."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def read_config(model_dir: Path) -> ModelConfig:
    """Read config.json (and generation_config.json for the end tokens) of a Hugging Face folder.

    ModelNotSupported says what the model needs that is not there; a missing or malformed file is one too.
    """
    raw = _read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.is_file() else {})


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """`read_config` on parsed files."""
    architecture = _architecture(raw)
    missing = [
        name
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if not isinstance(raw.get(name), int)
    ]
    if missing:
        raise ModelNotSupported(f"config.json lacks {', '.join(missing)} (whole numbers)")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelNotSupported(f"hidden_act {raw['hidden_act']!r}: only silu is supported")
    if raw.get("mlp_bias"):
        raise ModelNotSupported("mlp_bias is true: feed-forward layers with a bias are not supported")
    num_heads = raw["num_attention_heads"]
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelNotSupported(f"{num_heads} heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    if head_dim % 2:
        raise ModelNotSupported(f"head_dim {head_dim} is odd: rotary positions turn pairs")
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    max_position_tokens = int(raw.get("max_position_embeddings") or 2048)
    _check_sliding_window(raw, architecture, max_position_tokens)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=raw["intermediate_size"],
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, max_position_tokens),
        max_position_tokens=max_position_tokens,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or bool(raw.get("attention_bias", False)),
        output_bias=not is_qwen2 and bool(raw.get("attention_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_eos(generation.get("eos_token_id", raw.get("eos_token_id"))),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotSupported(f"{path} does not exist; a Hugging Face model folder has one") from None
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelNotSupported(f"{path} is not a JSON object")
    return parsed


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    for architecture in named:
        if architecture in _ARCHITECTURES:
            return str(architecture)
    asked = ", ".join(map(str, named)) or f"model_type {raw.get('model_type')!r}"
    raise ModelNotSupported(f"{asked} is not supported; supported are {', '.join(_ARCHITECTURES)}")


def _check_sliding_window(raw: Mapping[str, Any], architecture: str, max_position_tokens: int) -> None:
    """A window no shorter than the context, or one that is switched off, changes nothing; any other is refused."""
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ModelNotSupported("layer_types asks for other than full attention, which is not supported")
    if architecture == "LlamaForCausalLM" or raw.get("use_sliding_window") is False:
        return
    if architecture.startswith("Qwen") and "use_sliding_window" not in raw:
        return  # Qwen's own default is off
    window = raw.get("sliding_window")
    if window is not None and window < max_position_tokens:
        raise ModelNotSupported(
            f"sliding_window {window} is shorter than max_position_embeddings {max_position_tokens}: "
            "sliding-window attention is not supported (lower max_position_embeddings to serve short contexts)"
        )


def _rope(raw: Mapping[str, Any], max_position_tokens: int) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and rope_parameters (transformers 5)."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelNotSupported("partial_rotary_factor is not 1: rotating a part of each head is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, factor=float(parameters["factor"]))
    if kind == "llama3":
        original = parameters.get("original_max_position_embeddings") or max_position_tokens
        return RopeConfig(
            theta,
            llama3=Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_position_tokens=int(original),
            ),
        )
    raise ModelNotSupported(f"rope type {kind!r} is not supported; supported are default, linear and llama3")


def _eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(each) for each in value)
