"""One model, another replay mode, and its folder as it was."""

import json

import pytest

from services.local.home import Home
from services.local.replayed import folder_with


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_mode_a_folder_names_needs_no_other_folder(tmp_path, model) -> None:
    """Without a word it is off."""
    assert model == folder_with(Home.of(tmp_path), model, "off")
    (model / "fathom.json").write_text('{"replay": "mask"}')
    assert model == folder_with(Home.of(tmp_path), model, "mask")


def test_another_mode_gets_a_folder_of_links(tmp_path, model) -> None:
    """Same files, same public name, its own fathom.json; the model's folder is not written to; twice is no error."""
    (model / "fathom.json").write_text('{"name": "deep"}')
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    for _ in range(2):
        folder = folder_with(Home.of(tmp_path), model, "compact")

    assert {"name": "deep", "replay": "compact"} == json.loads((folder / "fathom.json").read_text())
    assert b"weights" == (folder / "model.safetensors").read_bytes()
    assert {"config.json", "model.safetensors", "fathom.json"} == {file.name for file in folder.iterdir()}
    assert before == {file.name: file.read_bytes() for file in model.iterdir()}


def test_an_unnamed_model_keeps_its_folders_name(tmp_path, model) -> None:
    """Callers go on asking for the same model."""
    folder = folder_with(Home.of(tmp_path), model, "mask")

    assert "tiny" == json.loads((folder / "fathom.json").read_text())["name"]
