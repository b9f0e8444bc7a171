"""What do the whole-suite tests share?"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.suite import Suite
from services.chassis.testing import OtlpReceiver
from services.local.pull import pull

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who uses the shared suite comes last, so that it runs beside no other; who breaks it comes at the very end."""
    items.sort(key=lambda item: ("shared_suite" in getattr(item, "fixturenames", ()), item.path.stem == "test_faults"))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder, made once for the whole checkout."""
    return pull(ROOT / ".fathom" / "models")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def receiver() -> AsyncIterator[OtlpReceiver]:
    """Receives the shared suite's spans."""
    async with OtlpReceiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_suite(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver
) -> AsyncIterator[Suite]:
    """The default model in bf16, for every test that brings its own prompts: a start costs half a minute of a core.

    Its users run in the session's event loop, for the receiver does.
    """
    folder = tmp_path_factory.mktemp("shared")
    async with Suite.running(folder, model=model_dir, dtype="bf16", otlp_endpoint=receiver.endpoint) as running:
        yield running
