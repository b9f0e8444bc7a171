"""The default model's own files, where they have been fetched: same ids as the library, text round trips."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.recipe.conversation import Conversation, Turn
from services.recipe.detokenize import Detokenizer
from services.recipe.model_folder import ServedModel, load_model

FOUND = sorted(path.parent for path in (Path(__file__).parents[3] / ".fathom" / "models").glob("*/tokenizer.json"))
TEXTS = [
    "Count from one to ten.",
    "1234567890 and 3.14159",
    "日本語, हिन्दी, עברית and 👩‍👩‍👧‍👦!",
    "def f(x):\n\treturn x  # <b>bold</b>\n\n\n  indented",
    "ends in <",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND, reason="no model under .fathom/models; `fathom pull` fetches one"),
]


@pytest.fixture(scope="module", params=FOUND, ids=lambda path: str(path.name))
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def library(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def chat_ids(model: ServedModel, *texts: str) -> list[int]:
    return list(model.encoder.chat_prompt(Conversation(tuple(Turn("user", (text,)) for text in texts))).ids)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_library_s_and_text_comes_back(model: ServedModel, library: Tokenizer, text: str) -> None:
    """Both directions."""
    ids = model.tokenizer.plain_ids(text)

    assert library.encode(text, add_special_tokens=False).ids == ids
    assert text == Detokenizer(model.tokenizer.pieces).feed(ids)


def test_chat_ids_are_those_of_the_template_s_text(model: ServedModel, library: Tokenizer) -> None:
    """The default system message, the turns, and where the answer begins."""
    ids = chat_ids(model, *TEXTS)
    prompt = library.decode(ids, skip_special_tokens=False)

    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert library.encode(prompt, add_special_tokens=False).ids == ids


def test_every_control_spelling_is_plain_in_a_message(model: ServedModel) -> None:
    """All at once, and each id the template brings stays."""
    spelled = "".join(model.tokenizer.spellings)
    plain = chat_ids(model, "x")
    evil = chat_ids(model, spelled)
    controls = {model.tokenizer.marked_ids(spelling)[0] for spelling in model.tokenizer.spellings}

    assert [i for i in plain if i in controls] == [i for i in evil if i in controls]
    assert spelled in Detokenizer(model.tokenizer.pieces).feed(evil)
