"""Copies beside steps change nothing: every order in which a device may do them ends as if all were done as asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv.block_bytes import BlockBytes
from kernels.kv.crossing import Crossing
from kernels.kv.layout import KvLayout

_BLOCKS = 5


@dataclass
class Device:
    """Two queues that a seed works off in some order that their waits allow."""

    choice: random.Random
    main: list[Callable[[], None]] = field(default_factory=list)
    side: list[Callable[[], None]] = field(default_factory=list)
    waits: dict[tuple[str, int], int] = field(default_factory=dict)
    """(queue, place): how far the other queue must be before."""
    done: dict[str, int] = field(default_factory=lambda: {"main": 0, "side": 0})

    def mark(self) -> int:
        return len(self.main)

    def is_past(self, mark: int) -> bool:
        return self.done["main"] >= mark

    @contextmanager
    def aside(self, after: int | None) -> Iterator[None]:
        if after is not None:
            self.waits["side", len(self.side)] = after
        yield

    def join(self) -> None:
        self.waits["main", len(self.main)] = len(self.side)

    def work(self, until: Callable[[], bool]) -> None:
        """Do things until the host has what it waits for."""
        while not until():
            ready = [name for name in ("main", "side") if self._can_go_on(name)]
            assert ready, "the queues wait for each other"
            name = self.choice.choice(ready)
            queue = self.main if name == "main" else self.side
            queue[self.done[name]]()
            self.done[name] += 1

    def _can_go_on(self, name: str) -> bool:
        other = "side" if name == "main" else "main"
        queue = self.main if name == "main" else self.side
        at = self.done[name]
        return at < len(queue) and self.done[other] >= self.waits.get((name, at), 0)


Turn = tuple[tuple[set[int], set[int]], list[tuple[str, int]]]
"""Blocks that a step writes and those that it reads; then copies."""
STEP = st.tuples(
    st.sets(st.integers(0, _BLOCKS - 1), min_size=1, max_size=2), st.sets(st.integers(0, _BLOCKS - 1), max_size=3)
)
COPIES = st.lists(st.tuples(st.sampled_from(["read", "write"]), st.integers(0, _BLOCKS - 1)), max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(STEP, COPIES), min_size=1, max_size=7), st.integers(0, 2**16))
def test_it_looks_as_if_all_were_done_in_order(turns: list[Turn], seed: int) -> None:
    """Steps launched one ahead, reads of any block, writes of blocks that no running step has: the same values."""
    device = Device(random.Random(seed))
    crossing = Crossing(device)
    real, asked = [0] * _BLOCKS, [0] * _BLOCKS
    got: dict[int, int] = {}
    expected: dict[int, int] = {}

    def read(block: int, place: int) -> None:
        got[place] = real[block]

    for number, ((written, seen), copies) in enumerate(turns):

        def step(memory: list[int], written=written, seen=seen, number=number) -> None:
            value = sum(memory[block] * (block + 3) for block in seen | written)
            for block in written:
                memory[block] = (value * 31 + number + block) % 65_521

        crossing.before_step()
        device.main.append(partial(step, real))
        step(asked)
        crossing.after_step(written)
        running = written | seen
        # The step before is collected; this one runs.
        device.work(partial(device.is_past, number))
        for kind, block in copies:
            if kind == "write" and block in running:
                continue
            place = len(device.side)
            with crossing.copying(block):
                if kind == "read":
                    device.side.append(partial(read, block, place))
                    expected[place] = asked[block]
                else:
                    device.side.append(partial(real.__setitem__, block, 1000 + place))
                    asked[block] = 1000 + place
    device.work(lambda: device.done["main"] == len(device.main) and device.done["side"] == len(device.side))

    assert asked == real
    assert expected == got


def test_a_copy_waits_for_no_step_that_leaves_its_block_alone() -> None:
    """Nor for one that is done; a step waits for copies only if there were any since the last."""
    device = Device(random.Random(1))
    crossing = Crossing(device)
    for block in (1, 2):
        crossing.before_step()
        device.main.append(lambda: None)
        crossing.after_step([block])
    for block in (3, 2, 1):
        with crossing.copying(block):
            device.side.append(lambda: None)
    device.work(lambda: device.is_past(2))
    with crossing.copying(2):
        device.side.append(lambda: None)
    crossing.before_step()
    crossing.before_step()

    assert {("side", 1): 2, ("side", 2): 1, ("main", 2): 4} == device.waits


def test_a_fetched_block_is_what_it_was() -> None:
    """Whatever is written to the block after the question."""
    layout = KvLayout.dense(num_layers=1, block_tokens=16, num_kv_heads=1, head_dim=16, dtype="bf16")
    cache = BlockBytes(layout, 3, torch.device("cpu"))
    cache.write_block(1, bytes([7]) * layout.block_bytes)
    fetched = cache.fetch_block(1)
    cache.write_block(1, bytes(layout.block_bytes))

    assert fetched.is_there()
    assert bytes([7]) * layout.block_bytes == fetched.payload()
