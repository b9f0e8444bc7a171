"""A tiny V4.1 without an executor: one sequence in pieces, its intermediates, and what its caches hold.

Models are named by their numeric recipe: the golden one, or a shallow one for tests without golden vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from kernels.batch import NO_REPLAY, Batch, Image, Replay, Row
from kernels.models.deepseek_v41 import DeepseekV41, OpenedV41
from kernels.models.v41.step import Watch
from kernels.ops.numerics import EXACT, KVQ, QUANT
from kernels.tests.golden_files import tiny_v41
from kernels.tests.shallow_v41 import shallow_v41

NUMERICS = {"exact": EXACT, "kvq": KVQ, "quant": QUANT}
SHALLOW = {"shallow kvq": KVQ, "shallow quant": QUANT}
IDS = [(index * 37 + 11 + index * index % 7) % 320 for index in range(260)]
WINDOWS = 6
BLOCKS_EACH = 24
"""Sequence n lives in window n and in blocks of its own."""
_THREADS = [1]


@cache
def model_of(numerics: str) -> DeepseekV41:
    """One model per mode and test process."""
    torch.set_num_threads(1)
    folder = shallow_v41() if numerics in SHALLOW else tiny_v41()
    recipe = (NUMERICS | SHALLOW)[numerics]
    with torch.inference_mode():
        opened = OpenedV41(folder, numerics=recipe, block_tokens=None, device=torch.device("cpu"), progress=_silent)
        return opened.build(num_blocks=1 + WINDOWS * BLOCKS_EACH, num_windows=1 + WINDOWS)


def threads() -> int:
    """What `run` computes with; an executor elsewhere in the process may have chosen otherwise."""
    return _THREADS[0]


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Let `run` use that many."""
    before, _THREADS[0] = _THREADS[0], count
    try:
        yield
    finally:
        _THREADS[0] = before


def blocks_of(sequence: int) -> range:
    first = 1 + (sequence - 1) * BLOCKS_EACH
    return range(first, first + BLOCKS_EACH)


def row_of(
    ids: Sequence[int],
    start: int,
    end: int,
    *,
    sequence: int = 1,
    replay: Replay = NO_REPLAY,
    images: tuple[Image, ...] = (),
) -> Row:
    """Tokens [start, end) of a sequence."""
    return Row(
        sequence,
        ids[start:end],
        start,
        blocks_of(sequence),
        window=sequence,
        preceding=ids[max(start - 3, 0) : start],
        replay=replay,
        images=images,
    )


@dataclass
class Watcher:
    """Keeps every intermediate; puts `forced` ones in the place of those computed."""

    forced: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.seen[name] = self.forced.get(name, value)
        return self.seen[name]


@torch.inference_mode()
def run(numerics: str, *rows: Row, watch: Watch | None = None) -> Tensor:
    """Logits of each row's last token.

    On one thread unless a test chose more: two that share a busy core wait for each other at every small product.
    """
    if torch.get_num_threads() != threads():
        torch.set_num_threads(threads())
    return model_of(numerics).forward(Batch(rows), every_row=True, watch=watch)


@torch.inference_mode()
def all_logits(numerics: str, row: Row) -> Tensor:
    """Logits of every token that the decoder half computes."""
    model, watch = model_of(numerics), Watcher()
    last = run(numerics, row, watch=watch)
    every = model.weights.head.run(watch.seen["stream_final"], watch.seen["pre_final"])
    assert torch.equal(last, every[-1:]), "the head is invariant"
    return every


@torch.inference_mode()
def start(numerics: str, sequence: int = 1) -> None:
    """Empty a sequence's window and blocks."""
    model = model_of(numerics)
    model.reset_window(sequence)
    for block in blocks_of(sequence):
        model.write_block(block, bytes(model.layout.block_bytes))


@torch.inference_mode()
def prefill(
    numerics: str,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    *,
    sequence: int = 1,
    mates: Sequence[Row] = (),
    replay: Replay = NO_REPLAY,
    images: tuple[Image, ...] = (),
) -> Tensor:
    """Compute a prompt from nothing in pieces that end at `cuts`, mates before it; logits of the last token."""
    start(numerics, sequence)
    bounds = [0, *cuts, len(ids)]
    logits = torch.empty(0)
    for low, high in pairwise(bounds):
        row = row_of(ids, low, high, sequence=sequence, replay=replay, images=overlapping(images, low, high))
        for mate in mates:
            start(numerics, mate.sequence)
        logits = run(numerics, *mates, row)[-1]
    return logits


def overlapping(images: tuple[Image, ...], low: int, high: int) -> tuple[Image, ...]:
    return tuple(each for each in images if each.position < high and each.position + each.num_tokens > low)


def caches(numerics: str, num_tokens: int, sequence: int = 1) -> tuple[bytes, ...]:
    """A sequence's blocks and its window state."""
    model = model_of(numerics)
    size = model.layout.block_tokens
    blocks = [model.read_block(block) for block in blocks_of(sequence)[: -(-num_tokens // size)]]
    return (*blocks, model.read_window(sequence, encoder_only=False))


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Nobody asked."""
