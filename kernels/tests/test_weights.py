"""Weights read back are the weights that were stored, under Hugging Face's names; what is wrong is said at once."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from kernels.models.digest import SIDECAR
from kernels.models.weights import BadWeights, SafetensorsWeights, gguf_file, open_weights, require
from kernels.models.weights_gguf import gguf_config

HIDDEN, HEADS, KV_HEADS = 256, 4, 2
SHAPES = {
    "token_embd": (64, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (512, HIDDEN),
    "blk.0.ffn_up": (512, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, 512),
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order llama.cpp's converter writes: (i, i + half) of a head side by side."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, arch: str = "llama", kind: Kind = Kind.F32, extra=(), fields=()) -> dict[str, np.ndarray]:
    """A one-layer model; returns the stored arrays by GGUF name, before quantisation."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    numbers = {"embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": 512, "context_length": 1024}
    numbers |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    for name, value in numbers.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 100000.0)
    for name, value in dict(fields).items():
        writer.add_string(f"{arch}.{name}", value) if isinstance(value, str) else writer.add_uint32(
            f"{arch}.{name}", value
        )
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (SHAPES | dict(extra)).items()}
    for name, values in stored.items():
        suffix = "" if name.endswith(("weight", "bias")) else ".weight"
        if values.ndim == 1 or kind is Kind.F32:
            writer.add_tensor(name + suffix, values)
        elif kind is Kind.F16:
            writer.add_tensor(name + suffix, values.astype(np.float16))
        elif kind in {Kind.Q4_K, Kind.Q6_K}:  # the package reads these but does not write them: any bytes are a value
            raw = rng.integers(
                0, 48, (values.shape[0], values.shape[1] // 256 * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8
            )
            writer.add_tensor(name + suffix, raw, raw_dtype=kind)
            stored[name] = raw
        else:
            writer.add_tensor(name + suffix, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return stored


def write_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4).to(torch.bfloat16),
    "c": torch.ones(3, dtype=torch.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K]
)
def test_a_gguf_file_gives_the_values_it_stores(tmp_path, kind) -> None:
    """Every supported type, in its own dtype or fp32, with v and norms untouched and q and k rows put in order."""
    stored = write_gguf(tmp_path / "m.gguf", kind=kind)
    weights = open_weights(tmp_path)

    def value(name: str) -> np.ndarray:
        if kind in {Kind.Q4_K, Kind.Q6_K}:
            return gguf.quants.dequantize(stored[name], kind)
        return gguf.quants.dequantize(gguf.quants.quantize(stored[name], kind), kind).astype(np.float32)

    for name, hf in (
        ("attn_v", "self_attn.v_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("attn_output", "self_attn.o_proj"),
    ):
        tensor = weights.tensor(f"model.layers.0.{hf}.weight")
        assert {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32) == tensor.dtype
        np.testing.assert_array_equal(value(f"blk.0.{name}"), tensor.float().numpy())
        assert tuple(tensor.shape) == weights.shape(f"model.layers.0.{hf}.weight")
    for name, hf, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
        tensor = weights.tensor(f"model.layers.0.self_attn.{hf}.weight")
        np.testing.assert_array_equal(value(f"blk.0.{name}"), interleaved(tensor.float().numpy(), heads))
    np.testing.assert_array_equal(stored["output_norm"], weights.tensor("model.norm.weight").numpy())


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_keep_their_order(tmp_path, arch) -> None:
    """Their RoPE pairs are stored as halves already; biases and per-head norms come along."""
    extra = {"blk.0.attn_q.bias": (HIDDEN,), "blk.0.attn_q_norm": (64,), "output": (64, HIDDEN)}
    stored = write_gguf(tmp_path / "m.gguf", arch, extra=extra)
    weights = open_weights(tmp_path / "m.gguf")

    np.testing.assert_array_equal(
        stored["blk.0.attn_q"], weights.tensor("model.layers.0.self_attn.q_proj.weight").numpy()
    )
    np.testing.assert_array_equal(
        stored["blk.0.attn_q.bias"], weights.tensor("model.layers.0.self_attn.q_proj.bias").numpy()
    )
    assert {"lm_head.weight", "model.layers.0.self_attn.q_norm.weight"} <= set(weights.names())
    assert gguf_config(tmp_path)["tie_word_embeddings"] is False


def test_a_gguf_header_becomes_a_config(tmp_path) -> None:
    """The numbers a config.json has, fp32 header values in their written form."""
    write_gguf(tmp_path / "m.gguf")
    config = gguf_config(tmp_path / "m.gguf")

    expected = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 512,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 64,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    assert expected == {name: config[name] for name in expected}


def test_everything_wrong_with_a_gguf_is_listed(tmp_path) -> None:
    """One error for a scaled RoPE, a stored RoPE table and a tensor with no place in a dense model."""
    extra = {"rope_freqs": (32,), "blk.0.ffn_gate_inp": (8, HIDDEN)}
    write_gguf(tmp_path / "m.gguf", extra=extra, fields={"rope.scaling.type": "yarn"})
    with pytest.raises(BadWeights, match=r"Llama 3\.1.*ffn_gate_inp\.weight belongs to no.*yarn RoPE") as raised:
        open_weights(tmp_path)

    assert 3 == len(raised.value.problems)


@pytest.mark.parametrize(
    ("arch", "fields", "reason"),
    [("mamba", {}, "'mamba' is none of llama"), ("llama", {"expert_count": 8}, "mixture of experts")],
)
def test_models_that_are_not_dense_llamas_are_refused(tmp_path, arch, fields, reason) -> None:
    """Before any tensor is read."""
    write_gguf(tmp_path / "m.gguf", arch, fields=fields)
    with pytest.raises(BadWeights, match=reason):
        open_weights(tmp_path)


def test_a_safetensors_folder_gives_its_tensors(tmp_path) -> None:
    """Names sorted, dtypes kept, shapes known without reading."""
    weights = open_weights(write_folder(tmp_path, TENSORS))

    assert ("a", "b", "c") == weights.names()
    assert all(torch.equal(tensor, weights.tensor(name)) for name, tensor in TENSORS.items())
    assert all(tensor.dtype == weights.tensor(name).dtype for name, tensor in TENSORS.items())
    assert (2, 3) == weights.shape("a")
    assert gguf_file(tmp_path) is None


def test_a_sharded_folder_gives_all_its_shards(tmp_path) -> None:
    """The index names the shards; a missing shard, or a tensor missing from one, is named."""
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))

    assert ("a", "b") == open_weights(tmp_path).names()
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "x": "one.safetensors"}}))
    with pytest.raises(BadWeights, match=r"tensor x is not in its shard one\.safetensors"):
        open_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors", "b": "../two.safetensors"}}))
    with pytest.raises(BadWeights, match=r"two\.safetensors lies outside.*gone\.safetensors is missing"):
        open_weights(tmp_path)
    index.write_text("{}")
    with pytest.raises(BadWeights, match="no readable weight_map"):
        open_weights(tmp_path)


def test_all_missing_and_misshapen_tensors_are_in_one_error(tmp_path) -> None:
    """So that nobody repairs a folder one tensor a time."""
    weights = open_weights(write_folder(tmp_path, TENSORS))
    require(weights, {"a": (2, 3), "b": (4,)}, tmp_path)
    with pytest.raises(BadWeights) as raised:
        require(weights, {"a": (3, 2), "b": (4,), "x": (1,), "y": (1,)}, tmp_path)

    expected = ("tensor x is missing", "tensor y is missing", "tensor a has shape [2, 3], the config asks for [3, 2]")
    assert expected == raised.value.problems


def test_folders_without_usable_weights_say_what_they_lack(tmp_path) -> None:
    """No folder, an empty one, two GGUF files, and files cut short."""
    with pytest.raises(BadWeights, match="no such folder"):
        open_weights(tmp_path / "none")
    with pytest.raises(BadWeights, match=r"no model\.safetensors"):
        open_weights(tmp_path)
    write_gguf(tmp_path / "1.gguf")
    whole = (tmp_path / "1.gguf").read_bytes()
    (tmp_path / "1.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadWeights, match="not a complete GGUF"):
        open_weights(tmp_path)
    (tmp_path / "2.gguf").write_bytes(whole)
    with pytest.raises(BadWeights, match=r"2 GGUF files \(1\.gguf, 2\.gguf\)"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(BadWeights, match="not a complete safetensors"):
        open_weights(tmp_path)


def test_the_digest_names_the_contents_and_is_remembered(tmp_path) -> None:
    """The same weights elsewhere have the same digest; a changed file is hashed again, an unchanged one is not."""
    one = write_folder(tmp_path / "one", TENSORS)
    two = write_folder(tmp_path / "two", TENSORS)
    calls: list[tuple[str, int, int]] = []
    digest = open_weights(one, lambda *step: calls.append(step)).digest()
    size = (one / "model.safetensors").stat().st_size

    assert 32 == len(digest)
    assert ("hash weights", size, size) == calls[-1]
    assert digest == open_weights(two).digest()
    calls.clear()
    assert digest == open_weights(one, lambda *step: calls.append(step)).digest()
    assert [] == calls

    (two / SIDECAR).write_text("[] not what it was")
    assert digest == open_weights(two).digest()
    write_folder(two, TENSORS | {"c": torch.zeros(3, dtype=torch.float16)})
    assert digest != open_weights(two).digest()


def test_a_folder_that_cannot_be_written_to_still_has_a_digest(tmp_path) -> None:
    """Models are often mounted read-only; here a folder of the sidecar's name is in the way."""
    folder = write_folder(tmp_path, TENSORS)
    (folder / SIDECAR).mkdir()
    weights = SafetensorsWeights(folder, [folder / "model.safetensors"])

    assert weights.digest() == open_weights(folder).digest()
