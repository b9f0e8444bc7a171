"""A config is understood or refused, never half understood."""

import json

import pytest

from kernels.models.config import Llama3Scaling, ModelNotSupported, RopeConfig, parse_config, read_config
from kernels.tests.tiny_models import FAMILIES


def test_families_differ_where_they_should() -> None:
    """Biases, q/k norms and head sizes come from the family."""
    llama, mistral, qwen2, qwen3 = (parse_config(FAMILIES[name], {}) for name in ("llama", "mistral", "qwen2", "qwen3"))

    assert [(True, True), (False, False), (True, False), (False, False)] == [
        (each.qkv_bias, each.output_bias) for each in (llama, mistral, qwen2, qwen3)
    ]
    assert [False, False, False, True] == [each.qk_norm for each in (llama, mistral, qwen2, qwen3)]
    assert (32, 3) == (qwen3.head_dim, qwen3.group)
    assert Llama3Scaling(8.0, 1.0, 4.0, 256) == llama.rope.llama3
    assert RopeConfig(1e6) == qwen2.rope


def test_end_tokens_come_from_the_generation_config_first() -> None:
    """generation_config.json knows the chat model's end tokens; config.json is the fallback."""
    raw = FAMILIES["llama"]
    assert (2,) == parse_config(raw, {}).eos_token_ids
    assert (7, 9) == parse_config(raw, {"eos_token_id": [7, 9]}).eos_token_ids
    assert () == parse_config(raw | {"eos_token_id": None}, {}).eos_token_ids


@pytest.mark.parametrize(
    ("family", "change", "why"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ("llama", {"hidden_act": "gelu"}, "only silu"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"vocab_size": None}, "lacks vocab_size"),
        ("llama", {"num_key_value_heads": 4}, "cannot share"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mistral", {"sliding_window": 512}, "sliding_window 512 is shorter"),
        ("qwen2", {"use_sliding_window": True}, "sliding_window 64 is shorter"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_unsupported_configs_are_refused(family, change, why) -> None:
    """What is not computed is named, before any weight is read."""
    with pytest.raises(ModelNotSupported, match=why):
        parse_config(FAMILIES[family] | change, {})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": 4096}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("qwen3", {"layer_types": ["full_attention", "full_attention"]}),
        ("llama", {"sliding_window": 64}),
    ],
)
def test_windows_that_change_nothing_are_ignored(family, change) -> None:
    """A window as long as the context, switched off, or foreign to the family is full attention."""
    parse_config(FAMILIES[family] | change, {})


def test_a_folder_without_config_says_so(tmp_path) -> None:
    """Missing and malformed files are the model's fault and say which."""
    with pytest.raises(ModelNotSupported, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelNotSupported, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelNotSupported, match="cannot be read"):
        read_config(tmp_path)
