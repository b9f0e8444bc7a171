"""A V4.1 checkpoint is checked whole before anything is read, and read tensor by tensor."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.models.v41.checkpoint import Checkpoint, Part
from kernels.models.v41.config import parse_v41_config, read_v41_config
from kernels.models.v41.tensors import expected_tensors, is_engram_table
from kernels.models.weights import BadWeights
from kernels.ops.quant import dequantise_fp4_weight, dequantise_fp8_weight
from kernels.tests.golden_files import tiny_v41
from kernels.tests.test_v41_config import raw, real

__all__ = ["raw"]


@pytest.fixture(scope="module")
def stored():
    return load_file(tiny_v41() / "model.safetensors")


@pytest.fixture(scope="module")
def config():
    return read_v41_config(tiny_v41())


def folder_with(path, tensors, shards=1):
    """A folder of these tensors, dealt to shards with an index when there are several."""
    path.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copyfile(tiny_v41() / name, path / name)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    file_of = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return path


def test_every_tensor_of_the_tiny_checkpoint_is_expected(config, stored) -> None:
    """Same names, shapes and formats, none more."""
    expected = {name: (spec.shape, spec.dtype) for name, spec in expected_tensors(config).items()}

    assert expected == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}


@pytest.mark.slow
def test_published_sizes_come_out_of_the_config(raw) -> None:
    """Spot checks of the real model: names, shapes, and 763 billion parameters in all."""
    specs = expected_tensors(parse_v41_config(real(raw), {}))
    shapes = {name: spec.shape for name, spec in specs.items()}
    counted = sum(
        spec.shape[0] * spec.shape[1] * (2 if spec.dtype == torch.int8 else 1)
        for name, spec in specs.items()
        if len(spec.shape) == 2 and not name.endswith(".scale")
    )

    expected = {
        "layers.39.attn.wq_b.weight": (32768, 1280), "layers.0.attn.wo_a.weight": (8192, 4096),
        "layers.0.attn.wo_a.scale": (256, 128), "layers.7.ffn.experts.383.w2.weight": (5120, 1152),
        "layers.7.ffn.experts.383.w2.scale": (5120, 72), "layers.0.hc_attn_fn": (24, 20480),
        "layers.14.engram.embed.scale": (384016682, 8), "layers.1.engram.wkv.weight": (25600, 6144),
        "mtp.0.main_proj.weight": (5120, 15360), "mtp.2.confidence_head.proj.weight": (1, 5376),
        "mtp.1.ffn.gate.weight": (128, 5120), "layers.8.attn.compressor.wgate.weight": (512, 5120),
    }  # fmt: skip
    assert expected == {name: shapes[name] for name in expected}
    assert "layers.20.attn.compressor.wgate.weight" not in shapes
    assert "layers.24.attn.indexer.wk.weight" not in shapes
    assert 763 == round(counted / 1e9)


def test_tensors_come_dequantised(config, stored) -> None:
    """fp8 by its blocks, fp4 by its rows, the rest as stored; each in memory of its own."""
    checkpoint = Checkpoint(tiny_v41(), config)
    fp8, fp4 = "layers.3.attn.wq_b", "mtp.1.ffn.experts.5.w2"

    expected = dequantise_fp8_weight(stored[f"{fp8}.weight"], stored[f"{fp8}.scale"])
    assert torch.equal(expected, checkpoint.dense(f"{fp8}.weight"))
    expected = dequantise_fp4_weight(stored[f"{fp4}.weight"], stored[f"{fp4}.scale"])
    assert torch.equal(expected, checkpoint.expert("mtp.1", 5, "w2"))
    assert torch.equal(expected, checkpoint.expert("mtp.1.", 5, "w2"))
    assert torch.equal(stored["norm.weight"].float(), checkpoint.dense("norm.weight"))
    assert torch.equal(stored["layers.0.hc_ffn_fn"], checkpoint.dense("layers.0.hc_ffn_fn"))
    assert torch.float32 == checkpoint.dense("embed.weight").dtype
    with pytest.raises(ValueError, match="gathered by row"):
        checkpoint.dense("layers.1.engram.embed.weight")
    with pytest.raises(KeyError):
        checkpoint.dense("layers.99.attn_norm.weight")


def test_engram_rows_are_gathered(config, stored) -> None:
    """In any order and shape, repeated or not, the same as from the whole table; none outside it."""
    checkpoint = Checkpoint(tiny_v41(), config)
    scales = stored["layers.4.engram.embed.scale"].float().repeat_interleave(32, dim=1)
    table = stored["layers.4.engram.embed.weight"].float() * scales
    rows = torch.tensor([[895, 0, 3], [3, 3, 500]])

    assert torch.equal(table[rows], checkpoint.engram_rows(4, rows))
    assert (0, 128) == tuple(checkpoint.engram_rows(4, torch.empty(0, dtype=torch.int64)).shape)
    for outside in (-1, 896):
        with pytest.raises(IndexError, match="a table of 896 rows"):
            checkpoint.engram_rows(4, torch.tensor([0, outside]))


def test_a_prefix_shards_and_fp32_norms_make_no_difference(config, stored, tmp_path) -> None:
    """Names may start with `model.`, tensors may lie in several files, bf16 ones may be kept in fp32."""
    tensors = {f"model.{name}" if name.startswith("layers.") else name: tensor for name, tensor in stored.items()}
    tensors["norm.weight"] = tensors["norm.weight"].float()
    checkpoint = Checkpoint(folder_with(tmp_path, tensors, shards=3), config)
    whole = Checkpoint(tiny_v41(), config)

    for name in ("layers.0.attn.wkv.weight", "norm.weight", "layers.11.ffn.experts.15.w3.weight", "image_end"):
        assert torch.equal(whole.dense(name), checkpoint.dense(name))
    assert torch.equal(whole.engram_rows(1, torch.arange(9)), checkpoint.engram_rows(1, torch.arange(9)))
    assert whole.names == checkpoint.names


def test_everything_wrong_with_a_checkpoint_is_in_one_error(config, stored, tmp_path) -> None:
    """Missing, unknown, of another shape, of another format, and there twice."""
    tensors = dict(stored)
    del tensors["head.weight"], tensors["layers.2.attn.wkv.scale"]
    tensors["layers.2.attn.compressor.ape"] = torch.zeros(2)
    tensors["layers.0.ffn_norm.weight"] = torch.zeros(64, dtype=torch.bfloat16)
    tensors["layers.0.attn.wkv.weight"] = tensors["layers.0.attn.wkv.weight"].float()
    tensors["layers.1.hc_attn_base"] = tensors["layers.1.hc_attn_base"].bfloat16()
    tensors["model.norm.weight"] = tensors["norm.weight"].clone()
    with pytest.raises(BadWeights) as raised:
        Checkpoint(folder_with(tmp_path, tensors), config)

    expected = {
        "tensor norm.weight is there twice", "tensor head.weight is missing",
        "tensor layers.2.attn.wkv.scale is missing", "tensor layers.2.attn.compressor.ape is unknown to this config",
        "tensor layers.0.ffn_norm.weight has shape [64], the config asks for [128]",
        "tensor layers.0.attn.wkv.weight is float32, expected float8_e4m3fn",
        "tensor layers.1.hc_attn_base is bfloat16, expected float32",
    }  # fmt: skip
    assert expected == set(raised.value.problems)


def test_broken_files_are_named(config, stored, tmp_path) -> None:
    """Cut short, a header of nonsense, an index that lies, a format nobody reads, another kind of file."""
    whole = (tiny_v41() / "model.safetensors").read_bytes()
    folder = folder_with(tmp_path / "one", {"a": torch.zeros(2)})
    header = int.from_bytes(whole[:8], "little")
    for data in (
        whole[: len(whole) // 2],
        whole[:100],
        b"",
        b"\xff" * 64,
        whole[:8] + b"x" * header + whole[8 + header :],
    ):
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(BadWeights, match="not a complete safetensors"):
            Checkpoint(folder, config)
    save_file({"a": torch.zeros(2, dtype=torch.float64)}, folder / "model.safetensors")
    with pytest.raises(BadWeights, match=r"holds tensors in F64"):
        Checkpoint(folder, config)

    sharded = folder_with(tmp_path / "two", stored, shards=2)
    index = sharded / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    other = {"model-0.safetensors": "model-1.safetensors", "model-1.safetensors": "model-0.safetensors"}
    index.write_text(json.dumps({"weight_map": placed | {"head.weight": other[placed["head.weight"]]}}))
    with pytest.raises(BadWeights, match=r"tensor head\.weight is not in its shard"):
        Checkpoint(sharded, config)
    index.write_text(json.dumps({"weight_map": placed | {"head.weight": 3}}))
    with pytest.raises(BadWeights, match="no readable weight_map"):
        Checkpoint(sharded, config)


@pytest.mark.slow
def test_progress_counts_the_bytes_of_its_part(config) -> None:
    """From nothing to all of them, for the language model and for the vision tower."""
    parts: dict[Part, bool] = {"language": False, "vision": True}
    for part, is_mine in parts.items():
        steps: list[tuple[str, int, int]] = []
        checkpoint = Checkpoint(tiny_v41(), config, lambda *step, to=steps: to.append(step), part=part)
        mine = [name for name in checkpoint.names if name.startswith(("vision.", "aligner.", "image_")) == is_mine]
        for name in mine:
            if not is_engram_table(name) and not name.endswith(".scale"):
                checkpoint.dense(name)

        assert {"load weights"} == {stage for stage, _, _ in steps}
        assert sorted(done for _, done, _ in steps) == [done for _, done, _ in steps]
        assert (checkpoint.total_bytes, checkpoint.total_bytes) == steps[-1][1:]


def test_the_digest_names_weights_config_and_tokenizer(config, stored, tmp_path) -> None:
    """Sharding aside, whatever decides an answer changes it."""
    folder = folder_with(tmp_path, stored)
    digest = Checkpoint(folder, config).digest()

    assert 32 == len(digest)
    assert digest == Checkpoint(folder, config).digest()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"swiglu_limit": 2.0', '"swiglu_limit": 3.0'))
    assert digest != Checkpoint(folder, read_v41_config(folder)).digest()
    (folder / "tokenizer.json").write_text("{}")
    assert digest != Checkpoint(folder, config).digest()
