"""Fixtures: a tiny model folder, and a whole recipe service before a scripted entrypoint."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from proto.common_pb2 import ModelCard
from services.recipe.response_store import ResponseStore
from services.recipe.tests.deepseek import write_folder
from services.recipe.tests.response_rig import empty_database, private_postgresql
from services.recipe.tests.running import Running, Starter, serve_recipe
from services.recipe.tests.tiny import CHATML, make_tokenizer
from services.recipe.tokenizer import PromptTokenizer


@pytest.fixture(scope="session", autouse=True)
def _patient_stores() -> Iterator[None]:
    """Stores wait longer than the five seconds after which a client is told: a disk of a busy machine stands still."""
    defaults = ResponseStore.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "query_seconds", 30.0)
        yield


@pytest.fixture(scope="session")
def library() -> Tokenizer:
    """The tiny tokenizer as the library has it: the yardstick."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer() -> PromptTokenizer:
    """The tiny tokenizer as the service has it."""
    return PromptTokenizer(make_tokenizer())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    config = {"max_position_embeddings": 512, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": eos}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    return path


@pytest.fixture
def serving(folder: Path) -> Starter:
    """What starts a recipe of the test's own, for `async with`: takes a script and settings."""
    return lambda script, **settings: serve_recipe(script, **({"model": folder} | settings))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(folder: Path) -> AsyncIterator[Running]:
    """One recipe for all tests that leave it as they found it: starting one takes half a second."""
    async with serve_recipe(lambda _request: (), folder) as running:
        yield running


@pytest.fixture
def recipe(shared: Running) -> Iterator[Running]:
    """The shared recipe; say what it answers with `play`."""
    models = list(shared.entrypoint.models)
    yield shared
    shared.entrypoint.models[:] = models


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """A PostgreSQL server of the tests' own."""
    with private_postgresql() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def state_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database for the state of the Responses API, in both kinds. Starting PostgreSQL takes seconds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state.sqlite3'}"
    return empty_database(request.getfixturevalue("postgresql"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_deep(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One recipe for a V4.1 model, for all tests that leave it as they found it."""
    folder = write_folder(tmp_path_factory.mktemp("models") / "deep")
    card = ModelCard(name="deep", context_tokens=4096, takes_images=True)
    async with serve_recipe(lambda _request: (), folder, card=card) as running:
        yield running


@pytest.fixture
def deep(shared_deep: Running) -> Iterator[Running]:
    """The shared recipe for a V4.1 model; say what it answers with `play`."""
    shared_deep.play(lambda _request: ())
    yield shared_deep
    shared_deep.play(lambda _request: ())
