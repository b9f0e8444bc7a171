"""A device's blocks are all filled, to the last one, and what differs in one of them is found."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from bench.engine_models import write_model
from bench.gpu_full import measure, tables_of
from bench.gpu_soak import TINY
from kernels.executor import Executor


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """A tiny model on the CPU; a few blocks are left over."""
    folder = write_model(TINY, tmp_path_factory.mktemp("model"), seed=1, dtype=torch.bfloat16)
    return Executor.load(Path(folder), dtype="bf16", num_blocks=1 + 3 * 8 + 5, device="cpu")


def test_tables_end_with_the_last_block(executor: Executor) -> None:
    """And share none."""
    tables = tables_of(executor)

    assert executor.num_blocks - 1 == tables[-1][-1]
    assert [6, 7] == [tables[0][0], tables[0][1]]
    assert 3 * 8 == len({block for table in tables for block in table})


def test_a_full_device_answers_alike_everywhere(executor: Executor) -> None:
    """All sequences are the first one's, tokens and blocks."""
    made = measure(executor, 60.0)

    assert {"sequences": 3, "answers_that_differ": 0, "blocks_that_differ": 0, "passed": True}.items() <= made.items()


def test_a_block_that_differs_is_found(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of the last one."""
    read = executor.read_block

    def spoilt(block: int) -> bytes:
        made = read(block)
        return made if block != executor.num_blocks - 1 else bytes([made[0] ^ 1]) + made[1:]

    monkeypatch.setattr(executor, "read_block", spoilt)
    made = measure(executor, 60.0)

    assert (1, False) == (made["blocks_that_differ"], made["passed"])


def test_what_was_not_filled_in_time_does_not_pass(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share is said."""
    monkeypatch.setattr("bench.gpu_full.STEP_TOKENS", 1)
    made = measure(executor, 0.0)

    assert (1, False) == (made["sequences"], made["passed"])
    assert 8 / 29 == pytest.approx(made["filled_share"], abs=1e-3)
