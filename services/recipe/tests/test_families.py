"""Promises about model folders: the right dialect for each, and a clear word when it cannot be had."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.recipe.conversation import Conversation
from services.recipe.deepseek_parser import DeepseekParser
from services.recipe.deepseek_words import Mark
from services.recipe.dialect import PlainParser
from services.recipe.model_folder import load_model
from services.recipe.refusals import ApiError, ModelFolderError
from services.recipe.tests.deepseek import user, write_folder
from services.recipe.tests.tiny import CHATML

HELLO = Conversation((user("hello"),))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "deep")


@pytest.fixture
def deep(original: Path, tmp_path: Path) -> Path:
    """A V4.1 folder of the test's own."""
    return Path(shutil.copytree(original, tmp_path / "deep"))


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_v41_has_tools_reasoning_and_images(deep: Path) -> None:
    """By its config.json; the end token is the top level's."""
    model = load_model(deep)

    assert (True, True, "high") == (model.rules.takes_tools, model.rules.takes_images, model.rules.default_effort)
    assert isinstance(model.dialect.parser(HELLO), DeepseekParser)
    assert (model.tokenizer.control_id(Mark.END),) == model.eos_token_ids


def test_v41_without_a_tower_takes_no_images(deep: Path) -> None:
    """Tools it still takes."""
    change(deep / "config.json", vision_config=None)

    assert (True, False) == ((rules := load_model(deep).rules).takes_tools, rules.takes_images)


def test_chatml_models_have_text_and_tools(folder: Path) -> None:
    """And are spoken to by their template."""
    model = load_model(folder)

    assert (True, False, "none") == (model.rules.takes_tools, model.rules.takes_images, model.rules.default_effort)
    assert isinstance(model.dialect.parser(HELLO), PlainParser)


def test_the_folder_s_own_word_counts(deep: Path) -> None:
    """A V4.1 folder may be spoken to by a template, if it says so."""
    change(deep / "fathom.json", renderer="chat-template")
    (deep / "chat_template.jinja").write_text(CHATML)

    assert "none" == load_model(deep).rules.default_effort


def test_a_vocabulary_without_marks_takes_no_conversations(deep: Path) -> None:
    """What is missing is named; bare prompts are still served."""
    spelled = (deep / "tokenizer.json").read_text(encoding="utf-8").replace(Mark.SYSTEM, "<other>")
    (deep / "tokenizer.json").write_text(spelled, encoding="utf-8")
    assert Tokenizer.from_str(spelled).token_to_id(Mark.SYSTEM) is None
    model = load_model(deep)

    with pytest.raises(ApiError, match=r"lacks <.System.>") as raised:
        model.encoder.chat_prompt(HELLO)
    assert (400, "chat_template_missing") == (raised.value.status, raised.value.code)
    assert model.tokenizer.plain_ids("hello")


@pytest.mark.parametrize("renderer", ["deepseek", "", 4])
def test_an_unknown_renderer_is_found_at_start(deep: Path, renderer: object) -> None:
    """With the names that are known."""
    change(deep / "fathom.json", renderer=renderer)

    with pytest.raises(ModelFolderError, match=r"chat-template, deepseek-v4\.1, deepseek-recipe"):
        load_model(deep)


def test_the_library_is_an_extra(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there is a word on how to get it, and only those who ask for it need it."""
    change(deep / "fathom.json", renderer="deepseek-recipe")
    monkeypatch.delitem(sys.modules, "services.recipe.deepseek_library", raising=False)
    monkeypatch.delattr("services.recipe.deepseek_library", raising=False)
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)

    with pytest.raises(ModelFolderError, match=r"fathom\[deepseek\]"):
        load_model(deep)


def test_a_tower_without_rules_is_found_at_start(deep: Path) -> None:
    """Rather than at the first image."""
    change(deep / "config.json", vision_config={"patch_size": 0})

    with pytest.raises(ModelFolderError, match="vision_config"):
        load_model(deep)
