"""What may follow the tokens that were just drawn? Guessed on the device behind the draw, for the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.batch import Row, Sampled
from kernels.models.gpu.asking import NUM_TOLD, Asking, Earlier, features_of
from kernels.models.gpu.draws import Draw, Drawer
from kernels.models.gpu.staging import Returning, Staging
from kernels.models.gpu.v41.drafter import GpuDrafter
from kernels.ops.gpu_sampler import draw
from kernels.ops.gpu_step import noise_keys

_NOBODY = Earlier({})


class Guessed:
    """Tokens and drafts on their way to the host."""

    def __init__(self, drawn: Draw, returning: Returning, rows: Sequence[Row]) -> None:
        """returning: drafts and confidences by row.  rows: those that want a token."""
        self._drawn, self._returning, self._rows = drawn, returning, rows

    def wait(self) -> tuple[Sampled, ...]:
        """One per row, in order."""
        drafts, confidences = (each.tolist() for each in self._returning.wait())
        return tuple(
            _with_drafts(each, tokens, sure) if row.wants_drafts and each.problem is None else each
            for row, each, tokens, sure in zip(self._rows, self._drawn.wait(), drafts, confidences, strict=True)
        )


def _with_drafts(sampled: Sampled, tokens: Sequence[int], sure: Sequence[float]) -> Sampled:
    """Behind logits that nothing can be drawn from there are no drafts: such places have no confidence."""
    count = next((at for at, chance in enumerate(sure) if chance < 0), len(sure))
    return replace(sampled, drafts=tuple(tokens[:count]), confidences=tuple(sure[:count]))


class Guesser:
    """Drafts for one model. Rows that want none get some too: they cost little, and all have one shape."""

    def __init__(self, drafter: GpuDrafter, drawer: Drawer, num_rows: int, device: torch.device) -> None:
        self._drafter, self._drawer = drafter, drawer
        self._asking = Asking(1, num_rows)
        # Never grows: lines of `noise_keys`, then column, window slot, and where windows begin.
        self._staging = Staging(device, (NUM_TOLD + 3) * 8 * num_rows)
        self._confidences = torch.zeros(num_rows, drafter.places, device=device)
        self._drawn = torch.zeros(2, num_rows, dtype=torch.int32, device=device)

    def guess(self, drawn: Draw, batch: Sequence[Row], rows: Sequence[Row], ends: Tensor) -> Guessed:
        """Draft behind a draw of the same rows.

        batch: all rows of the step.  rows: those that want a token.  ends: [at least batch] int32, positions after the
        step's tokens, of drafts too.
        """
        count, standing = len(rows), self._drawer.standing
        told = [self._asking.of(row) for row in rows]
        features = replace(features_of(told), num_top=-1)
        columns = {row.sequence: column for column, row in enumerate(batch)}
        said = np.zeros((NUM_TOLD + 3, count), np.int64)
        said[:NUM_TOLD] = self._asking.told(rows, told, np.ones(count, np.int64), _NOBODY)
        said[NUM_TOLD] = [columns[row.sequence] for row in rows]
        said[NUM_TOLD + 1] = [row.window for row in rows]
        said[NUM_TOLD + 2] = [max(row.replay.window_from, row.replay.keep_from) for row in rows]
        (on_device,) = self._staging.send([said])
        lines, column, slots, window_from = (on_device[:NUM_TOLD], *on_device[NUM_TOLD:])
        # Where the newest tokens stand: behind the drafts that were accepted.
        positions = ends[column].long() - standing.rejected[:count]
        newest = standing.newest[:count]
        proposal = self._drafter.propose(newest, positions, slots, window_from)
        fine = standing.problems[:count] == 0
        for place in range(self._drafter.places):
            logits, sure = self._drafter.after(proposal, place, newest)
            asked = lines[:-2]
            if features.noise:
                lines[6] = positions + (1 + place)
                asked = noise_keys(lines, standing.rejected)
            draw(logits, asked, features, out=self._drawn)
            fine = fine & (self._drawn[1, :count] == 0)
            newest = self._drawer.drafts[:count, place]
            newest.copy_(self._drawn[0, :count])
            self._confidences[:count, place] = torch.where(fine, sure, -1.0)
        returning = Returning((self._drawer.drafts[:count], self._confidences[:count]))
        return Guessed(drawn, returning, rows)
