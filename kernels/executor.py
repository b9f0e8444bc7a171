"""The one door to the device: load a model, compute batches, move blocks in and out.

Only the engine thread that owns the block pool calls an executor. `launch` hands a step to the device and `collect`
waits for it and samples, so that the next step can be planned in between; on a CPU the device is this thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.batch import Batch, Row, Sampled, Scored
from kernels.kv.replay import Mode
from kernels.models.load import choose_device, open_model
from kernels.models.model import Draws, DrawsTokens, Dtype, Model, ModelInfo, OpenedModel, Progress
from kernels.models.weights import BadWeights
from kernels.ops.allocator import keep_freed_memory
from kernels.ops.row_tiles import NotInvariant
from kernels.ops.sampler import Draw, UnusableLogits, sample, score

DEFAULT_KV_BYTES = 1 << 30
DEFAULT_WINDOWS = 32
_PROOF_TOKENS = 150
_PROOF_SPLITS = (0, 37, 38, 130, 149)


@dataclass(frozen=True, slots=True)
class Step:
    """A launched batch. Collect it before the next but one is launched."""

    batch: Batch
    logits: Tensor
    """[wanted tokens, vocab_size] fp32: those that `Row.wanted` names, row by row. On a GPU, until the next launch."""
    draws: Draws | None = None
    """Tokens that the device has been told to sample; None where the host samples at collect."""

    def with_masks(self, masks: Mapping[int, bytes]) -> Step:
        """The same step with allowed masks, by sequence: only sampling needs them, so they are filled while it runs."""
        masked = (replace(row, allowed_mask=masks.get(row.sequence, row.allowed_mask)) for row in self.batch.rows)
        return replace(self, batch=Batch(tuple(masked)), draws=None) if masks else self


class Executor:
    """One model on one device, with its KV blocks and windows."""

    def __init__(
        self,
        model: Model,
        *,
        model_dir: Path,
        num_blocks: int,
        num_windows: int,
        replay: Mode,
        threads: int,
        weights_digest: bytes,
        invariant: bool = True,
    ) -> None:
        """`load` is the way in."""
        self.config: ModelInfo = model.info
        self.layout = model.layout
        self.window = model.window
        self.preceding_tokens = model.preceding_tokens
        self.num_blocks = num_blocks
        self.num_windows = num_windows
        """Window slots, the null window included; 0 for a model without windows."""
        self.replay = replay
        self.threads = threads
        self.recipe = model.numeric_recipe() + ("" if replay == "off" else f" replay={replay}")
        self.fingerprint = hashlib.sha256(
            b"fathom.model.1" + weights_digest + self.layout.digest() + self.recipe.encode()
        ).digest()
        self._model = model
        self._model_dir = model_dir
        self._invariant = invariant

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        model_dir: Path,
        *,
        dtype: Dtype,
        kv_bytes: int | None = None,
        num_blocks: int | None = None,
        block_tokens: int | None = None,
        num_windows: int = DEFAULT_WINDOWS,
        replay: Mode = "off",
        threads: int = 2,
        device: str | None = None,
        invariant: bool = True,
        progress: Progress | None = None,
    ) -> Executor:
        """Read a model folder, pack its weights and prove which row counts are bit-equal here.

        kv_bytes or num_blocks (null block included) sizes the cache; neither means 1 GiB, or on a GPU all that is free.
        device: None takes a GPU where there is one that this model and dtype run on.  invariant: a token's bits do not
        depend on its batch; False is for measuring what that costs on a GPU.  num_windows: sequences that
        can be computed at a time, where the model has windows.  replay: how windows are rebuilt after a hit; part of
        the fingerprint, for what other than "off" computes is not what a cold run would have.

        Raises ModelNotSupported, BadWeights, NotInvariant, or ValueError for a setting that cannot be.
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        opened = open_model(
            model_dir,
            dtype=dtype,
            block_tokens=block_tokens,
            replay=replay,
            device=torch.device(device) if device else choose_device(model_dir, dtype),
            invariant=invariant,
            progress=progress or _silent,
        )
        blocks = _count_blocks(opened, kv_bytes, num_blocks)
        windows = num_windows + 1 if opened.window else 0
        digest = opened.weights_digest()
        model = opened.build(num_blocks=blocks, num_windows=windows)
        return cls(
            model,
            model_dir=model_dir,
            num_blocks=blocks,
            num_windows=windows,
            replay=replay,
            threads=threads,
            weights_digest=digest,
            invariant=invariant,
        )

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Row counts proven bit-equal for this model's layers on this machine."""
        return self._model.row_tiles

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Prove the promise on the whole model and touch the memory a step uses. Only while no block is in use.

        One sequence computed whole, and in chunks ending with a decode step beside a batch mate, must give the same
        logits and the same KV in every bit.  Raises NotInvariant, and BadWeights for what no token can be drawn from.
        """
        report = progress or _silent
        block_tokens = self.layout.block_tokens
        tokens = min(_PROOF_TOKENS, self.config.max_position_tokens, (self.num_blocks - 1) // 2 * block_tokens)
        if tokens < 2:
            return
        per_table = -(-tokens // block_tokens)
        whole, cut = range(1, 1 + per_table), range(1 + per_table, 1 + 2 * per_table)
        ids = [(index * 7919 + 17) % self.config.vocab_size for index in range(tokens)]
        splits = sorted({min(split, tokens - 1) for split in _PROOF_SPLITS})
        windows = (1, 2) if self.window else (0, 0)
        for slot in windows:
            self.reset_window(slot)
        report("warm up", 0, len(splits) + 1)
        expected = self.logits(Batch((Row(0, ids, 0, whole, window=windows[0]),)))[0]
        if not torch.isfinite(expected).all():  # NaN is not even equal to itself: say what is wrong
            raise BadWeights(
                self._model_dir, ["a prompt's logits are not finite: NaN or infinite values in the weights"]
            )
        kv = [self.read_block(block_id) for block_id in whole]
        state = self.read_window(windows[0])
        got = expected
        # The mate starts anew at every cut: a window belongs to one position, and its own is past them all.
        for done, (start, end) in enumerate(zip(splits, [*splits[1:], tokens], strict=True)):
            report("warm up", done + 1, len(splits) + 1)
            self.reset_window(windows[0])
            preceding = ids[max(start - self.preceding_tokens, 0) : start]
            mate = Row(1, ids[: end - start], 0, whole, window=windows[0])
            got = self.logits(
                Batch((mate, Row(0, ids[start:end], start, cut, window=windows[1], preceding=preceding)))
            )[1]
        same_kv = kv == [self.read_block(block_id) for block_id in cut] and state == self.read_window(windows[1])
        if self._invariant and not (torch.equal(expected, got) and same_kv):
            raise NotInvariant(f"{self.recipe}: a prompt computed whole and in chunks differs on this machine")
        for block_id in (*whole, *cut):
            self.write_block(block_id, bytes(self.layout.block_bytes))
        for slot in windows:
            self.reset_window(slot)
        report("warm up", len(splits) + 1, len(splits) + 1)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Step:
        """Compute a step.  Raises BadBatch before anything is changed.

        A GPU computes it after this returns; then a row may hold PENDING instead of a token that is still being drawn.
        """
        logits = self._forward(batch, every_row=False)
        return Step(batch, logits, self._model.draw(batch, logits) if isinstance(self._model, DrawsTokens) else None)

    @torch.inference_mode()
    def collect(self, step: Step) -> tuple[Sampled, ...]:
        """One token per row that wants one, in row order. A row without usable logits says so in `problem`.

        A step with masks is drawn here, so before the next launch.
        """
        if isinstance(self._model, DrawsTokens):
            return (step.draws or self._model.draw(step.batch, step.logits)).wait()
        rows = [row for row in step.batch.rows if row.sampling]
        draws = [_draw(row) for row in rows]
        logits = step.logits
        if len(rows) < len(logits):  # some rows score their tokens
            logits = logits[[span[-1] for row, span in _spans(step.batch) if row.sampling]]
        problems: dict[int, str] = {}
        try:
            choices = sample(logits, draws)
        except UnusableLogits as error:
            problems = error.reasons
            fine = [index for index in range(len(rows)) if index not in problems]
            choices = sample(logits[fine], [draws[index] for index in fine])
        remaining = iter(choices)
        sampled = []
        for index, row in enumerate(rows):
            if index in problems:
                sampled.append(Sampled(row.sequence, -1, problem=problems[index]))
            else:
                choice = next(remaining)
                sampled.append(Sampled(row.sequence, choice.token_id, choice.logprob, choice.top))
        return tuple(sampled)

    @torch.inference_mode()
    def score(self, step: Step) -> dict[int, tuple[Scored, ...]]:
        """The logprobs of each row's targets, by sequence; nothing for a row whose logits are unusable."""
        found = {}
        for row, span in _spans(step.batch):
            if not row.targets:
                continue
            logits = step.logits[span[0] : span[0] + len(row.targets)]
            try:
                choices = score(logits, row.targets, num_top=row.num_target_logprobs)
            except UnusableLogits:
                continue
            found[row.sequence] = tuple(
                Scored(choice.token_id, choice.logprob, choice.top) for choice in choices if choice.logprob is not None
            )
        return found

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Compute a step and return each row's last logits, sampled or not: [rows, vocab_size] fp32."""
        logits = self._forward(batch, every_row=True)
        return logits.clone() if logits.is_cuda else logits  # a step's own are overwritten by the next

    @torch.inference_mode()
    def read_block(self, block_id: int) -> bytes:
        """The bytes of a block, as `layout` describes them."""
        return self._model.read_block(block_id)

    @torch.inference_mode()
    def copy_block(self, block_id: int, place: memoryview) -> None:
        """Copy the bytes of a block to host memory; ValueError when `place` has another size, or for the null block."""
        self._model.copy_block(block_id, place)

    @torch.inference_mode()
    def write_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        """Fill a block with layout.block_bytes bytes; ValueError for any other size or for the null block."""
        self._model.write_block(block_id, payload)

    @torch.inference_mode()
    def read_window(self, slot: int, *, encoder_only: bool = False) -> bytes:
        """A window state as `layout` describes it, or only its first window.encoder_bytes; b"" without windows."""
        return self._model.read_window(slot, encoder_only=encoder_only)

    @torch.inference_mode()
    def write_window(self, slot: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a state with one that `read_window` gave; ValueError for any other size or for the null window."""
        self._model.write_window(slot, payload)

    @torch.inference_mode()
    def reset_window(self, slot: int) -> None:
        """Make a state empty, as a sequence starts with it."""
        self._model.reset_window(slot)

    def _forward(self, batch: Batch, *, every_row: bool) -> Tensor:
        # OpenMP's thread count belongs to the calling thread, and load may have run in another.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return self._model.forward(batch, every_row=every_row)


def _count_blocks(opened: OpenedModel, kv_bytes: int | None, num_blocks: int | None) -> int:
    if kv_bytes is not None and num_blocks is not None:
        raise ValueError("give kv_bytes or num_blocks, not both")
    if kv_bytes is None and num_blocks is None and (fitting := opened.fitting_blocks()):
        return fitting
    count = num_blocks if num_blocks is not None else (kv_bytes or DEFAULT_KV_BYTES) // opened.layout.block_bytes
    if count < 2:
        raise ValueError(
            f"room for {count} blocks of {opened.layout.block_bytes} bytes;"
            " at least 2 are needed (one is the null block)"
        )
    return count


def _spans(batch: Batch) -> Iterator[tuple[Row, range]]:
    """Each row, and which of a step's logits are its."""
    start = 0
    for row in batch.rows:
        end = start + len(row.wanted())
        yield row, range(start, end)
        start = end


def _draw(row: Row) -> Draw:
    assert row.sampling is not None, "only rows that want a token are drawn for"
    return Draw(row.sampling, row.position + len(row.token_ids), row.history, row.num_prompt_tokens, row.allowed_mask)


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Nobody asked."""
