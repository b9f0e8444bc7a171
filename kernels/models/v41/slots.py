"""Where does each window state stand, and may a row start where it does?

A window is a chain: it continues at its end, or up to `backtrack_tokens` before the newest token it has seen, when
drafts were rejected. What was overwritten since cannot be read again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.batch import Row
from kernels.kv.window import WindowSpec
from kernels.models.model import BadBatch


@dataclass(slots=True)
class _Slot:
    end: int | None = None
    """Position after the last computed token; None before the first row."""
    seen: int = 0
    """Position after the newest token ever written."""
    is_empty: bool = True
    """Nothing was restored into it."""
    is_partial: bool = False
    """Only the encoder's part was restored."""


class WindowSlots:
    """The positions of one model's window states."""

    def __init__(self, spec: WindowSpec, *, num_windows: int, block_tokens: int) -> None:
        self._spec = spec
        self._block_tokens = block_tokens
        self._slots = [_Slot() for _ in range(num_windows)]

    def reset(self, slot: int) -> None:
        """It holds nothing now."""
        self._slots[slot] = _Slot()

    def restored(self, slot: int, num_bytes: int) -> None:
        """It holds a state now; the next row's position is the state's."""
        self._slots[slot] = _Slot(is_empty=False, is_partial=num_bytes < self._spec.state_bytes)

    def check(self, row: Row) -> None:
        """BadBatch unless the row's window can be read at the row's position."""
        where = f"sequence {row.sequence}"
        if not 0 < row.window < len(self._slots):
            raise BadBatch(f"{where}: window slots lie in 1..{len(self._slots) - 1}, the row names {row.window}")
        slot = self._slots[row.window]
        if slot.end is None:
            self._check_start(row, slot, where)
            return
        oldest = slot.seen - self._spec.backtrack_tokens
        if not oldest <= row.position <= slot.end:
            raise BadBatch(
                f"{where} starts at {row.position}; its window ends at {slot.end} and can go back to {oldest}:"
                f" at most {self._spec.backtrack_tokens} tokens before the newest one it has seen"
            )

    def advance(self, row: Row) -> None:
        """The row was computed."""
        slot = self._slots[row.window]
        slot.end = row.position + len(row.token_ids)
        slot.seen = max(slot.seen, slot.end)

    def _check_start(self, row: Row, slot: _Slot, where: str) -> None:
        replay = row.replay
        if slot.is_empty and row.position not in {0, replay.window_from}:
            raise BadBatch(
                f"{where} starts at {row.position} with an empty window: it starts at 0, or at replay.window_from"
            )
        if slot.is_partial and (row.position % self._block_tokens or replay.keep_from < row.position):
            raise BadBatch(
                f"{where} continues an encoder state at {row.position}: that stands at a block's end, and"
                " replay.keep_from lies at or beyond it"
            )
