"""Does the vision tower compute the golden embeddings, and the same ones whatever else it encodes?"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.models.config import ModelNotSupported
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import read_v41_config
from kernels.models.v41.vision_tower import VisionTower
from kernels.models.vision import ImageEncoder, load_encoder
from kernels.models.weights import BadWeights
from kernels.ops.linear import choose
from kernels.ops.numerics import KVQ, QUANT, Numerics
from kernels.tests.golden_files import golden, golden_json, tiny_v41

CPU = torch.device("cpu")
HIDDEN = 128
KINDS = {"start": 0, "image": 1, "newline": 2, "end": 3}


def make_tower(dtype: str, numerics: Numerics) -> VisionTower:
    config = read_v41_config(tiny_v41())
    assert config.vision is not None
    return VisionTower(config.vision, Checkpoint(tiny_v41(), config).dense, choose(dtype, CPU), numerics, CPU)


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    return make_tower("fp32", KVQ)


@pytest.fixture(scope="module")
def encoder() -> ImageEncoder:
    loaded = load_encoder(tiny_v41(), dtype="fp32", threads=1)
    assert loaded is not None
    return loaded


def golden_picture() -> Tensor:
    """The golden image in the middle of a grey picture of whole patches, as the service pads it."""
    described, image = golden_json("vision/vision"), golden("vision.image")
    high, wide = described["grid"]
    picture = torch.full((high * 14, wide * 14, 3), 127, dtype=torch.uint8)
    top, left = described["top"], described["left"]
    picture[top : top + image.shape[0], left : left + image.shape[1]] = image
    return picture


def relative_error(expected: Tensor, actual: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def noise(height: int, width: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy().tobytes()


def test_patches_are_the_golden_ones(tower: VisionTower) -> None:
    """Centred, padded with 127, normalised by 0.5 and 0.5, channel-major, in raster order: equal in every bit."""
    expected = golden("vision.patches").float()
    assert torch.equal(expected.reshape(len(expected), -1), tower.patches(golden_picture()))


def test_embeddings_are_the_golden_ones_without_rounding(tower: VisionTower) -> None:
    """fp32: 1e-4 is the manifest's tolerance; 2e-6 is what fp32 sums of this size differ by."""
    high, wide = golden_json("vision/vision")["grid"]
    embedded = tower.embed(golden("vision.patches").float().reshape(high * wide, -1), high, wide)
    assert 1e-4 > float((embedded - golden("vision.exact.embeddings")).abs().max())


def test_embeddings_are_the_golden_ones_in_production_numerics() -> None:
    """bf16: rel L2 <= 0.02, the manifest's tolerance."""
    high, wide = golden_json("vision/vision")["grid"]
    patches = golden("vision.patches").float().reshape(high * wide, -1)
    assert 0.02 > relative_error(
        golden("vision.quant.embeddings"), make_tower("bf16", QUANT).embed(patches, high, wide)
    )


def test_the_span_has_marks_where_the_layout_says(tower: VisionTower) -> None:
    """Start, a newline after each row, end: the checkpoint's own vectors; image rows in raster order between them."""
    kinds = torch.tensor([KINDS[kind] for kind in golden_json("vision/vision")["kinds"]])
    span = tower.span(golden_picture())
    stored = Checkpoint(tiny_v41(), read_v41_config(tiny_v41()))

    assert (len(kinds), HIDDEN) == tuple(span.shape)
    assert 1e-4 > float((span[kinds == KINDS["image"]] - golden("vision.exact.embeddings")).abs().max())
    for mark in ("start", "newline", "end"):
        rows = span[kinds == KINDS[mark]]
        assert torch.equal(stored.dense(f"image_{mark}").expand_as(rows), rows)


def test_an_image_does_not_depend_on_the_others(encoder: ImageEncoder) -> None:
    """The same bits first, last, and after larger and smaller images."""
    first = encoder.encode(noise(70, 98), width=98, height=70)
    for size in ((14, 14), (210, 140), (42, 42)):
        encoder.encode(noise(*size, seed=1), width=size[1], height=size[0])
    assert first == encoder.encode(noise(70, 98), width=98, height=70)


def test_a_pixel_matters(encoder: ImageEncoder) -> None:
    """Another picture has other embeddings: nothing is taken from an earlier one."""
    one, other = noise(70, 98), bytearray(noise(70, 98))
    other[0] ^= 255
    assert encoder.encode(one, width=98, height=70) != encoder.encode(other, width=98, height=70)


def test_picture_and_size_must_agree(encoder: ImageEncoder) -> None:
    """A caller's mistake is refused before anything is computed."""
    with pytest.raises(ValueError, match="no 98 x 70 RGB picture"):
        encoder.encode(noise(70, 98)[:-1], width=98, height=70)
    with pytest.raises(ValueError, match="whole patches of 14"):
        encoder.encode(noise(70, 97), width=97, height=70)


def test_the_fingerprint_names_weights_and_arithmetic(encoder: ImageEncoder, tmp_path: Path) -> None:
    """Equal for an equal load; another for another dtype or another value in the tower."""
    again = load_encoder(tiny_v41(), dtype="fp32", threads=1)
    rounded = load_encoder(tiny_v41(), dtype="bf16", threads=1)
    other = load_encoder(with_other_newline(tmp_path), dtype="fp32", threads=1)
    assert again is not None
    assert rounded is not None
    assert other is not None
    assert encoder.fingerprint == again.fingerprint
    assert 3 == len({encoder.fingerprint, rounded.fingerprint, other.fingerprint})


def with_other_newline(folder: Path) -> Path:
    """A copy of the checkpoint in which one bit of image_newline differs."""
    target = shutil.copytree(tiny_v41(), folder / "other")
    file = target / "model.safetensors"
    file.chmod(0o644)
    blob = bytearray(file.read_bytes())
    length = int.from_bytes(blob[:8], "little")
    begin, _end = json.loads(blob[8 : 8 + length])["image_newline"]["data_offsets"]
    blob[8 + length + begin] ^= 1
    file.write_bytes(blob)
    return target


def test_models_without_a_tower_have_none(tmp_path: Path) -> None:
    """A Llama folder, and one whose weights are a GGUF file, are no errors."""
    assert load_encoder(tmp_path, dtype="bf16", threads=1) is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert load_encoder(tmp_path, dtype="bf16", threads=1) is None


def test_int8_is_refused_by_name() -> None:
    """As the language model does: fp4 weights cannot become int8."""
    with pytest.raises(ModelNotSupported, match="int8"):
        load_encoder(tiny_v41(), dtype="int8", threads=1)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A config that asks for a deeper tower than the file holds."""
    target = shutil.copytree(tiny_v41(), tmp_path / "deeper")
    config = target / "config.json"
    config.chmod(0o644)
    asked = json.loads(config.read_text())
    asked["vision_config"]["num_hidden_layers"] = 3
    config.write_text(json.dumps(asked))
    with pytest.raises(BadWeights, match=r"vision\.blocks\.2\.norm1\.weight is missing"):
        load_encoder(target, dtype="fp32", threads=1)
