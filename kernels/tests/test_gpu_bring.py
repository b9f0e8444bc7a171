"""Weights that are asked for before their product begins: all of them once, nothing beside them, nothing by default."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, in whose language the kernels are written, is not installed")

from kernels.ops import gpu_bring
from kernels.ops.gpu_bring import ALIGNED_BYTES, bring, shared_by, wanted
from kernels.tests import gluon_alone
from kernels.tests.gluon_alone import Launcher


def brought_whole(asked: list[tuple[int, int, int]], data: Tensor) -> bool:
    """Whether these pieces are the data's whole sixteens, each once."""
    reached = data.data_ptr()
    for at, size, _ in sorted(asked):
        if at != reached:
            return False
        reached += size
    return reached == data.data_ptr() + data.nbytes // ALIGNED_BYTES * ALIGNED_BYTES


@pytest.mark.parametrize("size", [0, 15, 16, 4096, 131_072, 131_073, 300_001])
def test_every_piece_is_asked_for_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a piece, whole programs, and a last short piece; what is not wanted is passed over."""
    monkeypatch.setattr(gpu_bring, "bring_kernel", Launcher(gpu_bring.bring_kernel, is_late=False))
    monkeypatch.setattr(gluon_alone, "BROUGHT", [])
    data = torch.zeros(size, dtype=torch.uint8)
    bring(None, data, None)

    assert brought_whole(gluon_alone.BROUGHT, data)


@pytest.mark.parametrize("threads", [1, 128, 124 * 128])
@pytest.mark.parametrize("size", [16, 4096, 33_554_432, 33_554_447])
def test_threads_share_what_there_is(threads: int, size: int) -> None:
    """Their pieces are whole sixteens, cover all of it, and are no longer than they need be."""
    share = shared_by(threads, torch.empty(size, dtype=torch.uint8))

    assert 0 == share.piece_bytes % ALIGNED_BYTES
    assert size - size % ALIGNED_BYTES == share.size <= threads * share.piece_bytes
    assert threads * (share.piece_bytes - ALIGNED_BYTES) < share.size


def test_nothing_is_brought_until_a_place_is_worth_it() -> None:
    """And never by what is no GPU; a place that nobody knows is a mistake."""
    assert not gpu_bring.PLACES
    assert wanted("wo_b", torch.zeros(64)) is None
    with pytest.raises(ValueError, match="wo_c"):
        wanted("wo_c", torch.zeros(64))
