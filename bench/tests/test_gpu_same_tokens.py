"""A folder of a tokenizer alone is made a model; one with weights is left as it is."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the bench cannot be imported")

from safetensors import safe_open

from bench.engine_models import SHAPES
from bench.gpu_same_tokens import with_weights


def test_a_folder_without_weights_gets_random_ones(tmp_path: Path) -> None:
    """Beside what it holds; hidden files and other folders stay behind, and the folder itself is not written to."""
    folder, scratch = tmp_path / "words", tmp_path / "scratch"
    for each in (folder, scratch, folder / "deep"):
        each.mkdir()
    for name in ("tokenizer.json", "config.json", ".digest"):
        (folder / name).write_text("{}")
    made = with_weights(folder, scratch)

    assert {"tokenizer.json", "config.json", "model.safetensors"} == {each.name for each in made.iterdir()}
    assert json.loads((made / "config.json").read_text()) == SHAPES["smollm2-135m"]
    assert "{}" == (folder / "config.json").read_text()
    with safe_open(made / "model.safetensors", "pt") as weights:
        assert [49152, 576] == weights.get_slice("model.embed_tokens.weight").get_shape()
    assert made == with_weights(made, tmp_path / "nowhere")
