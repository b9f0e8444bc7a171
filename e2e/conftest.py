"""What do the whole-suite tests share?"""

import fcntl
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
import pytest_asyncio
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # ships no types

from e2e.suite import Suite
from services.chassis.testing import OtlpReceiver
from services.local.pull import pull

ROOT = Path(__file__).resolve().parents[1]
# Files of one group run in one worker, in this order. Of those that use the shared suite, who breaks it comes last; and
# whoever forgets all window states would take another suite's, too.
TOGETHER = {
    "test_same_tokens_v41": "windows",
    "test_chat_v41": "windows",
    "test_apis": "shared suite",
    "test_same_tokens_bf16": "shared suite",
    "test_journey": "shared suite",  # early: of many requests a second only some are traced
    "test_structured": "shared suite",
    "test_requests": "shared suite",
    "test_faults": "shared suite",
}
# With two suites at a time, the group that takes longest begins first; a file that is not here is a group of its own.
# (A worker is given its next one when two tests of the last are left.)
LONGEST_FIRST = ("shared suite", "test_same_tokens", "windows", "test_kvstore", "test_launcher")


def group_of(stem: str) -> str:
    """The group of a test file, by its name without suffix."""
    return TOGETHER.get(stem, stem)


class InGroups(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out whole groups. (`--dist loadgroup` goes by marks that do not reach it with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(Path(nodeid.partition("::")[0]).stem)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> InGroups:
    return InGroups(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures how soon something happens: no other test runs meanwhile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by group and file; in a file, who measures comes late: others then keep it waiting least."""
    places, files = [*LONGEST_FIRST], [*TOGETHER]

    def rank(item: pytest.Item) -> tuple[int, int, bool]:
        stem = item.path.stem
        place = places.index(group_of(stem)) if group_of(stem) in places else len(places)
        return place, files.index(stem) if stem in files else 0, item.get_closest_marker("alone") is not None

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that measures wait for the other worker's test to end, and keep its next one waiting.

    Outside of every timeout, and only where there are two workers. No one goes hungry: the other has an end.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folders: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]  # no public way in a hook
    with (folders.getbasetemp().parent / "alone.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


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
    async with Suite.running(
        folder, model=model_dir, dtype="bf16", otlp_endpoint=receiver.endpoint, has_console=True
    ) as running:
        yield running
