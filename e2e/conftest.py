"""What do the whole-suite tests share?"""

import fcntl
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # ships no types

from e2e.suite import Suite
from services.chassis.testing import OtlpReceiver
from services.local.pull import pull

ROOT = Path(__file__).resolve().parents[1]
# Files of one group run in one worker, in this order. Of those that use the shared suite, who breaks it comes last, and
# who measures at the end of test_requests and the beginning of test_faults; and whoever forgets all window states would
# take another suite's, too.
TOGETHER = {
    "test_same_tokens_v41": "windows",
    "test_chat_v41": "windows",
    "test_memory": "shared suite",  # first: it is about a suite that has done nothing yet
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

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which a worker crashed, if it did; what the worker had left goes to the others.

        xdist's own hands out the test again, crash after crash, and groups that were done: a worker that is given one
        of these waits for good, for nothing in it ever ends.
        """
        work: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        left = [test for tests in work.values() for test, is_done in tests.items() if not is_done]
        for group, tests in work.items():
            if unrun := {test: False for test, is_done in tests.items() if not is_done and test != left[0]}:
                self.workqueue[group] = unrun
        if left:
            for other in self.assigned_work:
                self._reschedule(other)
        return left[0] if left else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> InGroups:
    return InGroups(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures how soon something happens: no other test runs meanwhile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by group and file. Who measures stands side by side in the files' order: the other worker is stopped once."""
    places, files = [*LONGEST_FIRST], [*TOGETHER]

    def rank(item: pytest.Item) -> tuple[int, int]:
        stem = item.path.stem
        place = places.index(group_of(stem)) if group_of(stem) in places else len(places)
        return place, files.index(stem) if stem in files else 0

    items.sort(key=rank)


class Turn:
    """Whose turn it is, of two workers: both run tests, or one runs those that measure and the other waits."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def take(self, *, is_alone: bool) -> None:
        """Wait until the other worker's test ends, if this one is to run alone; or until the other's have."""
        fcntl.flock(self._file, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)

    def give(self) -> None:
        """Let the other worker go on."""
        fcntl.flock(self._file, fcntl.LOCK_UN)


TURN = pytest.StashKey[Turn]()


def turn_of(config: pytest.Config) -> Turn | None:
    """None where there is one worker: nobody waits."""
    if not hasattr(config, "workerinput"):
        return None
    if TURN not in config.stash:
        folders: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]  # no public way in a hook
        config.stash[TURN] = Turn(folders.getbasetemp().parent / "alone.lock")
    return config.stash[TURN]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Let a test that measures wait for the other worker's test to end, and keep its next one waiting.

    The turn is kept from one such test to the next: to wait for one of the other's long tests each time would take
    minutes. Outside of every timeout. No one goes hungry: tests that measure have an end, and a worker that stops at
    a failure gives its turn up.
    """
    turn = turn_of(item.config)
    if turn is None:
        return (yield)
    turn.take(is_alone=_is_alone(item))
    try:
        return (yield)
    finally:
        is_last = bool(item.session.shouldstop or item.session.shouldfail)
        if is_last or not (_is_alone(item) and _is_alone(nextitem)):
            turn.give()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """However this worker ended, the other one goes on."""
    turn = turn_of(session.config)
    if turn is not None:
        turn.give()


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


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
    env = {"FATHOM_PREFILL_CHUNK_TOKENS": "256"}  # half of the default: a prompt of 257 tokens goes in chunks
    async with Suite.running(
        folder, model=model_dir, dtype="bf16", otlp_endpoint=receiver.endpoint, has_console=True, env=env
    ) as running:
        yield running
