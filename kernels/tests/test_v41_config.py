"""A V4.1 config is read whole, and everything that cannot be served is told at once."""

import copy
import json

import pytest

from kernels.models.config import ModelNotSupported
from kernels.models.v41.config import V41Config, is_v41, parse_v41_config, read_v41_config
from kernels.tests.golden_files import tiny_v41


@pytest.fixture
def raw():
    return json.loads((tiny_v41() / "config.json").read_text(encoding="utf-8"))


def real(raw):
    """The published model's sizes in the tiny one's file."""
    text = raw["text_config"]
    text |= {
        "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40,
        "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
        "o_groups": 8, "swiglu_limit": 10.0, "max_position_embeddings": 1048576, "n_routed_experts": 384,
        "num_experts_per_tok": 6, "sliding_window": 128, "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
        "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
        "engram_compressed_vocab_size": 99092, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
    }  # fmt: skip
    text["rope_scaling"]["original_max_position_embeddings"] = 65536
    return raw


def test_the_tiny_config_is_read() -> None:
    """Every part under its readable name, from the files in the folder."""
    config = read_v41_config(tiny_v41())

    assert (320, 128, 12, 8, 64, 16) == (
        config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.head_dim, config.rope_dims
    )  # fmt: skip
    assert (6, 16, 22, 16, 6) == (
        config.num_encoder_layers, config.window_tokens, config.ring_tokens, config.block_tokens,
        config.backtrack_tokens,
    )  # fmt: skip
    assert (6, 768) == (config.engram.rows_per_token, config.engram.width)
    assert ((322, 321), (1,)) == (config.image_token_ids, config.eos_token_ids)
    assert (1e-20, None) == (config.norm_eps, config.vision and config.vision.max_wh_ratio)


def test_layers_read_the_newest_source_before_them(raw) -> None:
    """Of keys and of selections; layers without compressed entries have none."""
    config = parse_v41_config(real(raw), {})

    assert [2, 2, 8, 14, 20, 20] == [config.kv_source_of(layer) for layer in (2, 7, 8, 19, 20, 39)]
    assert [2, 14, 20, 24, 36] == [config.index_source_of(layer) for layer in (3, 19, 23, 27, 39)]
    assert (20, 134, 24) == (config.num_encoder_layers, config.ring_tokens, config.engram.rows_per_token)
    with pytest.raises(ValueError, match="layer 1 reads no compressed cache"):
        config.kv_source_of(1)
    with pytest.raises(ValueError, match="layer 0 selects no entries"):
        config.index_source_of(0)


def test_a_model_without_vision_takes_no_images(raw) -> None:
    """No ids name an image's place."""
    del raw["vision_config"]
    config = parse_v41_config(raw, {})

    assert (None, ()) == (config.vision, config.image_token_ids)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": "eight"}, "text_config.num_attention_heads is 'eight', not a whole number >= 1"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a positive number"),
        ({"engram_layer_ids": 3}, "engram_layer_ids is 3, not a list of whole numbers"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sqrtsoftplus'"),
        ({"hc_mult": 2}, "hc_mult is 2: only 4"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type is 'linear': only 'yarn'"),
        ({"rope_scaling": None}, "text_config.rope_scaling is missing"),
        ({"compress_ratios": [0] * 12}, "compress_ratios lists 12 layers, the model has 12 and 3 of the drafter"),
        ({"compress_ratios": [0] * 12 + [1, 0, 0]}, "compress_ratios of the drafter's layers are not 0"),
    ],
)
def test_a_field_that_cannot_be_is_named(raw, changes, reason) -> None:
    """With its value and what would be right."""
    raw["text_config"] |= changes
    with pytest.raises(ModelNotSupported) as raised:
        parse_v41_config(raw, {})

    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 2, 1, 1, 1, 0, 0, 0]}, "ratio 0 or 2 follows one of ratio 1"),
        ({"compress_ratios": [0, 0, 4, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0]}, "not all 0, 1 or 2"),
        ({"kv_source_layer_ids": [4, 6]}, "before the first KV source"),
        ({"kv_source_layer_ids": [2, 4, 6, 8]}, "the first layer of ratio 1 is not the last KV source"),
        ({"index_source_layer_ids": [2, 6, 8]}, "a KV source does not select entries"),
        ({"index_source_layer_ids": [1, 2, 4, 6]}, "not increasing layers of ratio 1 or 2"),
        ({"candidate_source_layer_id": 4}, "candidate source"),
        ({"candidate_topk_blocks": 1}, "smaller than index_topk"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is odd"),
        ({"qk_rope_head_dim": 128}, "larger than a head"),
        ({"o_groups": 3}, "not a multiple of o_groups"),
        ({"sliding_window": 17}, "sliding_window is odd"),
        ({"num_experts_per_tok": 17}, "larger than the number of experts"),
        ({"engram_layer_ids": [1, 7]}, "not layers of the encoder"),
        ({"engram_num_embeddings": [690]}, "each with its number of rows"),
        ({"dspark_target_layer_ids": [5, 6, 7]}, "not layers of one half"),
        ({"dspark_noise_token_id": 320}, "outside the vocabulary"),
        ({"moe_intermediate_size": 72}, "moe_intermediate_size 72 is not a multiple of 32"),
        ({"kv_source_layer_ids": []}, "the first layer of ratio 1 is not the last KV source"),
        ({"engram_vocab_size": 10**18}, "fewer rows than tables of engram_vocab_size"),
        ({"engram_pad_token_id": 320}, "engram_pad_token_id lies outside"),
        ({"dspark_target_layer_ids": [9, 9, 11]}, "names a layer twice"),
        ({"dspark_block_size": 16}, "dspark_block_size is not smaller"),
    ],
)
def test_parts_that_do_not_fit_are_named(raw, changes, reason) -> None:
    """Each rule by what it breaks."""
    raw["text_config"] |= changes
    with pytest.raises(ModelNotSupported) as raised:
        parse_v41_config(raw, {})

    assert reason in str(raised.value)


def test_all_reasons_are_in_one_error(raw) -> None:
    """So that nobody repairs a config one field a time."""
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "float"}
    del raw["text_config"]["hidden_size"], raw["bos_token_id"]
    with pytest.raises(ModelNotSupported) as raised:
        parse_v41_config(raw, {})

    for reason in ("weight_block_size is [128, 128]", "scale_fmt is 'float'", "expert_dtype is None",
                   "text_config.hidden_size is None", "config.bos_token_id is None"):  # fmt: skip
        assert reason in str(raised.value)


def test_other_files_are_refused(tmp_path, raw) -> None:
    """No file, no JSON, no object, another architecture, and a config without its parts."""
    with pytest.raises(ModelNotSupported, match=r"config\.json does not exist"):
        read_v41_config(tmp_path)
    for text, reason in {"{": "cannot be read", "[]": "not a JSON object", "{}": "do not name"}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelNotSupported, match=reason):
            read_v41_config(tmp_path)
    with pytest.raises(ModelNotSupported, match=r"text_config is missing.*quantization_config is missing"):
        parse_v41_config({"architectures": ["DeepseekV41ForCausalLM"]}, {})

    assert not is_v41({"architectures": ["LlamaForCausalLM"]})
    assert not is_v41({})


def test_end_tokens_come_from_the_generation_config_first(raw) -> None:
    """As with every other model."""
    before = copy.deepcopy(raw)

    assert (7, 8) == parse_v41_config(raw, {"eos_token_id": [7, 8]}).eos_token_ids
    assert (1,) == parse_v41_config(raw, {}).eos_token_ids
    assert before == raw
    assert isinstance(parse_v41_config(real(raw), {}), V41Config)


@pytest.mark.parametrize(
    ("eos", "reason"),
    [
        ("a", "generation_config.eos_token_id is 'a'"),
        ([1, None], "generation_config.eos_token_id is [1, None]"),
        ([1, 320], "eos_token_id lies outside the vocabulary"),
        (-1, "generation_config.eos_token_id is -1"),
    ],
)
def test_end_tokens_that_cannot_be_are_named(raw, eos, reason) -> None:
    """One beyond the vocabulary would have every request refused."""
    with pytest.raises(ModelNotSupported) as raised:
        parse_v41_config(raw, {"eos_token_id": eos})

    assert reason in str(raised.value)
