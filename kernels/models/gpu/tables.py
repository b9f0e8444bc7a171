"""Which table row does each sequence have on the device, and what has changed in it since the last step?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.batch import PENDING, Row
from kernels.models.model import BadBatch
from kernels.ops.gpu_verify import MOST_LINES

NOBODY = 0
"""The table row of padding."""


def written_blocks(rows: Sequence[Row], block_tokens: int) -> Iterator[int]:
    """Blocks that a step writes, or some that rows moved back by drafts would have written."""
    for row in rows:
        end = row.position + len(row.token_ids)
        # Drafts of the step before may have been rejected: the row then begins earlier than it says.
        start = max(row.position - MOST_LINES, 0) if row.token_ids[0] == PENDING else row.position
        yield from row.block_table[start // block_tokens : (end - 1) // block_tokens + 1]


@dataclass(slots=True)
class _Entry:
    line: int
    blocks: list[int] = field(default_factory=list)


class TableRows:
    """The host's mirror of the device's block tables. Nobody says when sequences end: the longest unseen gives way."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        block_tokens: int,
        vocab_size: int,
        max_position_tokens: int,
    ) -> None:
        """num_rows: NOBODY's included; a batch can have one sequence fewer."""
        self.most_blocks = -(-max_position_tokens // block_tokens)
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._max_position_tokens = max_position_tokens
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._free = list(range(num_rows - 1, NOBODY, -1))
        self._num_rows = num_rows

    def check(self, rows: Sequence[Row]) -> list[list[int] | None]:
        """Raise BadBatch for what cannot be computed; nothing is changed yet.

        Returns for each row the blocks that the device must be told, None where it knows them.
        """
        if not rows:
            raise BadBatch("a batch has at least one row")
        if len(rows) >= self._num_rows:
            raise BadBatch(f"a batch has {len(rows)} rows; this device keeps tables of {self._num_rows - 1}")
        if len({row.sequence for row in rows}) < len(rows):
            raise BadBatch("a sequence has one row in a batch")
        return [self._check_row(row) for row in rows]

    def place(self, rows: Sequence[Row], news: Sequence[list[int] | None]) -> tuple[list[int], NDArray[np.int32]]:
        """Table row of each row, and changes [n, 2] (flat index, block id) that the device must be told first.

        news: what `check` returned.
        """
        entries = self._entries
        lines: list[int] = []
        for row in rows:
            entry = entries.get(row.sequence)
            if entry is not None:
                entries.move_to_end(row.sequence)
            lines.append(NOBODY if entry is None else entry.line)
        changes: list[tuple[int, int]] = []
        for index, (row, blocks) in enumerate(zip(rows, news, strict=True)):
            if blocks is None:
                continue
            if lines[index] == NOBODY:
                lines[index] = self._admit(row.sequence, set(lines))
            entry = entries[row.sequence]
            known, start = entry.blocks, entry.line * self.most_blocks
            changes += [
                (start + at, block) for at, block in enumerate(blocks) if at >= len(known) or known[at] != block
            ]
            entry.blocks = blocks
        return lines, np.array(changes, np.int32).reshape(-1, 2)

    def _admit(self, sequence: int, taken: set[int]) -> int:
        if not self._free:
            oldest = next(name for name, entry in self._entries.items() if entry.line not in taken)
            self._free.append(self._entries.pop(oldest).line)
        line = self._free.pop()
        self._entries[sequence] = _Entry(line)
        return line

    def _check_row(self, row: Row) -> list[int] | None:
        token_ids, position = row.token_ids, row.position
        count = len(token_ids)
        end = position + count
        if not count or position < 0:
            raise BadBatch(f"sequence {row.sequence}: a row has at least one token at a position of at least 0")
        if end > self._max_position_tokens:
            raise BadBatch(f"sequence {row.sequence} reaches {end} tokens; the model takes {self._max_position_tokens}")
        lowest, highest = (token_ids[0], token_ids[0]) if count == 1 else (min(token_ids), max(token_ids))
        is_waiting = lowest == PENDING and token_ids[0] == PENDING and count == 1 + row.num_drafts
        if (lowest < 0 and not is_waiting) or highest >= self._vocab_size:
            raise BadBatch(f"token ids lie in 0..{self._vocab_size - 1}; the batch has {lowest}..{highest}")
        needed = (end - 1) // self._block_tokens + 1
        blocks = list(row.block_table[:needed])
        if len(blocks) < needed:
            raise BadBatch(
                f"sequence {row.sequence} needs {needed} blocks for {end} tokens; its table has {len(row.block_table)}"
            )
        entry = self._entries.get(row.sequence)
        # What the device was told before was checked before.
        if entry is not None and entry.blocks[:needed] == blocks:
            return None
        if min(blocks) < 1 or max(blocks) >= self._num_blocks:
            raise BadBatch(f"sequence {row.sequence}: block ids lie in 1..{self._num_blocks - 1}")
        return blocks
