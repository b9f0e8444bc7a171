"""What tokens are told by one launch is what torch makes of the same numbers, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, in whose language the kernels are written, is not installed")

from kernels.models.gpu.v41 import tokens
from kernels.models.gpu.v41.planner import extent_of, stored_of
from kernels.models.gpu.v41.tokens import Extent, Laid, Layouter, Slab, Told, Turns
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_told import Say
from kernels.ops.gpu_verify import Standing
from kernels.tests.shallow_v41 import shallow_v41

LIMIT, REACH, PLACES, LINES = 400, 3, 9, 12


class Batch:
    """Random sequences of one step, as the host says them."""

    def __init__(self, config: V41Config, counts: list[int], kept: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

        self.counts, self.kept, num = torch.tensor(counts), torch.tensor(kept), len(counts)
        self.vocab = config.vocab_size
        said = torch.zeros(len(Say), num, dtype=torch.int32)
        said[Say.COUNT], said[Say.DECODER_COUNT] = self.counts, self.kept
        # Some begin at position 0, and of a pair some have the first and some the second.
        begins = draw(8, LIMIT - max(counts), num) * (draw(0, 3, num) > 0)
        said[Say.END] = torch.where(self.counts > 0, begins + self.counts, 0)
        said[Say.LINE], said[Say.WINDOW] = draw(1, LINES, num), draw(1, 9, num)
        for field in (Say.WINDOW_FROM, Say.WRITE_FROM, Say.KEEP_FROM):
            said[field] = draw(0, LIMIT, num) * (draw(0, 2, num) > 0)
        self.said = said
        # Tokens above the vocabulary stand for images.
        self.ids = draw(-PLACES, self.vocab + 3, int(self.counts.sum()))
        self.preceding = draw(0, self.vocab + 1, num, REACH)
        self.earlier = torch.where(begins > 20, draw(-1, PLACES, num), -1)
        newest, problems, rejected = draw(0, 4, 3, PLACES)
        self.standing = Standing(newest, problems, rejected, draw(0, self.vocab, PLACES, REACH))
        self.named = draw(-2, self.vocab, PLACES)
        self.tables = draw(1, 999, LINES, -(-LIMIT // config.block_tokens))

    def told(self, stored: tuple[Tensor, Tensor], *, size: int, columns: int) -> Told:
        """As a step of so many tokens and sequences: fresh, for the device writes to it."""

        def padded(values: Tensor, fill: int, *shape: int) -> Tensor:
            made = torch.full(shape, fill, dtype=torch.int32)
            made[tuple(slice(0, length) for length in values.shape)] = values
            return made

        return Told(
            sequences=padded(self.said, 0, len(Say), columns),
            token_ids=padded(self.ids, 0, size),
            preceding=padded(self.preceding, self.vocab, columns, REACH),
            earlier=padded(self.earlier, -1, columns),
            wanted=torch.zeros(0, dtype=torch.int64),
            stored=stored[0],
            decoder_stored=stored[1],
        )


def layouter(config: V41Config, batch: Batch) -> Layouter:
    turns = torch.arange(4 * LIMIT * 8, dtype=torch.float32).view(4, LIMIT, 8)
    return Layouter(
        config, Turns((turns[0], turns[1]), (turns[2], turns[3])), batch.tables, batch.standing, batch.named
    )


def assert_equal(one: Any, two: Any, name: str) -> None:
    """Values, types, shapes, and that rows lie end to end, through all that is inside."""
    assert type(one) is type(two), name
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), name
        assert torch.equal(one, two), name
        assert one.is_contiguous() == two.is_contiguous(), name
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), name
        for key in one:
            assert_equal(one[key], two[key], f"{name}[{key}]")
    elif isinstance(one, tuple):
        assert len(one) == len(two), name
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            assert_equal(left, right, f"{name}[{index}]")
    elif is_dataclass(one):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(two, field.name), f"{name}.{field.name}")
    else:
        assert one == two, name


def told_alike(config: V41Config, batch: Batch, extents: tuple[Extent, Extent], told: Callable[[], Told]) -> Laid:
    """Laid out by torch and by the kernels, which are asserted to agree."""
    expected = layouter(config, batch).lay(told(), *extents)
    with interpreted():
        got = layouter(config, batch).lay(told(), *extents)
    assert_equal(expected, got, "laid")
    return got


def captured(config: V41Config, batch: Batch, size: int) -> Laid:
    """Both halves are one, and every token may go to rings."""
    extent, every = Extent(size, (Slab(slice(0, size), slice(0, size), LIMIT),)), torch.arange(size)
    return told_alike(config, batch, (extent, extent), lambda: batch.told((every, every), size=size, columns=size))


@pytest.mark.parametrize(
    ("size", "counts"),
    [(1, [1]), (4, [1, 2]), (16, [4, 4, 1, 3]), (33, [1, 30]), (64, [4] * 12), (20, [20])],
    ids=["one", "padded", "drafts", "a long one", "many", "whole"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_captured_step_is_told_as_by_torch(size: int, counts: list[int], seed: int) -> None:
    """Padding of tokens and of sequences, drafts moved back, replays, tokens to come, both halves alike."""
    config = read_v41_config(shallow_v41())
    captured(config, Batch(config, counts, counts, seed), size)


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_step_is_told_as_by_torch(seed: int) -> None:
    """Chunks of which the decoder half has the last tokens only, and the few that may go to rings."""
    config = replace(read_v41_config(shallow_v41()), vocab_size=50)
    counts, kept = [70, 1, 5, 33], [9, 1, 5, 2]
    batch = Batch(config, counts, kept, seed)
    ends = batch.said[Say.END].tolist()
    extents = extent_of(counts, ends), extent_of(kept, ends)
    rings = [torch.from_numpy(stored_of(np.array(each, np.int32), config.ring_tokens)) for each in (counts, kept)]
    stored = rings[0], rings[1]
    got = told_alike(config, batch, extents, lambda: batch.told(stored, size=sum(counts), columns=len(counts)))

    assert sum(kept) == len(got.decoder.positions)


def test_torch_can_still_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that a benchmark compares: nothing is launched then."""
    monkeypatch.setattr(tokens, "IS_TOLD_AT_ONCE", False)
    monkeypatch.setattr(tokens, "tell_step", lambda *_: pytest.fail("launched"))
    config = read_v41_config(shallow_v41())
    captured(config, Batch(config, [1, 2], [1, 2], 0), 4)
