"""What can a preempted sequence reuse, which window state does it start from, and which one outlives the answer?"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.kv.replay import Hit, plan_hit
from services.chassis.handoff import SHM_ROOT
from services.chassis.telemetry import log
from services.chassis.window_store import WindowStore, WindowWorker

if TYPE_CHECKING:
    from kernels.executor import Executor


_ASSUMED_POOL_BYTES = 1 << 30
"""What a pool is taken for that was not given a size."""


def states_bytes(kv_bytes: int) -> int:
    """Return how much of the host's memory saved states may take beside a pool of that size; 0: of unknown size."""
    return (kv_bytes or _ASSUMED_POOL_BYTES) // 4


def open_worker(executor: Executor, *, max_bytes: int, root: Path = SHM_ROOT) -> WindowWorker | None:
    """Open this host's window store for the model; None for a model without windows, or without shared memory."""
    spec = executor.window
    if spec is None:
        return None
    is_exact = executor.replay == "off"
    try:
        store = WindowStore(
            fingerprint=executor.fingerprint,
            kind="whole" if is_exact else "encoder",
            state_bytes=spec.state_bytes if is_exact else spec.encoder_bytes,
            block_tokens=executor.layout.block_tokens,
            max_bytes=max_bytes,
            root=root,
        )
    except OSError as error:
        log.warning("window_store.unavailable", reason=str(error))
        return None
    return WindowWorker(store)


class States:
    """The rules of one replica's model, and the host's window store. Without windows there are only blocks to reuse."""

    def __init__(self, executor: Executor, worker: WindowWorker | None) -> None:
        """Without a worker no state is found or kept."""
        self.worker = worker
        self._executor = executor
        self._block_tokens = executor.layout.block_tokens
        self._encoder_only = executor.replay != "off"

    def plan(self, num_tokens: int, matched_blocks: int, states: Container[int] = ()) -> Hit:
        """What to reuse of the leading blocks that were found.  states: positions with a window state at hand."""
        return plan_hit(
            num_tokens,
            matched_blocks * self._block_tokens,
            block_tokens=self._block_tokens,
            window=self._executor.window,
            states=states,
            mode=self._executor.replay,
        )

    def most_blocks(self, num_tokens: int) -> int:
        """How many leading blocks a sequence can reuse at best: more are not held."""
        everywhere = range(num_tokens + 1)
        return self.plan(num_tokens, num_tokens // self._block_tokens, everywhere).block_tokens // self._block_tokens

    async def find_start(self, keys: Sequence[bytes], num_tokens: int) -> tuple[Hit, bytes | None]:
        """Plan with the states the host has for these found blocks, and read the one to start from."""
        if self.worker is None:
            return self.plan(num_tokens, len(keys)), None
        return await self.worker.find_start(keys, lambda states: self.plan(num_tokens, len(keys), states))

    def read(self, window: int) -> bytes:
        """Copy what the store keeps of a window slot off the device."""
        return self._executor.read_window(window, encoder_only=self._encoder_only)

    def keep(self, key: bytes, position: int, payload: bytes) -> None:
        """Save a state, or drop it (counted) when files are behind.  key: of the block that ends at the position."""
        if self.worker is not None and self.worker.has_room(len(payload)):
            self.worker.save(key, position, payload)
