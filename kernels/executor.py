"""The one door to the device: load a model, compute batches, move blocks in and out.

Only the engine thread that owns the block pool calls an executor. `launch` hands a step to the device and `collect`
waits for its tokens, so that the next step can be planned in between. Whatever is asked of a device happens in the
order in which it was asked: blocks that are read or written between two steps are those of all steps launched before.
A block that is written from the host must not be in a table of a step that is not collected yet.
On a CPU the device is this thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.batch import PENDING, Batch, Row, Sampled, Scored
from kernels.kv.block_bytes import Fetched
from kernels.kv.replay import Mode
from kernels.memory_plan import STEP_TOKENS, NoRoom
from kernels.models.drafter import Drafter
from kernels.models.host_draws import HostDraws, check_drafts, draw_rows, spans
from kernels.models.load import choose_device, open_model
from kernels.models.model import BadBatch, Draws, DrawsTokens, Dtype, Model, ModelInfo, OpenedModel, Progress
from kernels.models.weights import BadWeights
from kernels.ops.allocator import keep_freed_memory
from kernels.ops.row_tiles import NotInvariant
from kernels.ops.sampler import UnusableLogits, score

DEFAULT_KV_BYTES = 1 << 30
DEFAULT_WINDOWS = 32
_PROOF_TOKENS = 150
_PROOF_SPLITS = (0, 37, 38, 130, 149)
_PROOF_MATE_TOKENS = 9
"""Enough to move its mate's rows into other places of their tiles, few enough to cost little."""


@dataclass(frozen=True, slots=True)
class Step:
    """A launched batch. Collect it before the next but one is launched."""

    batch: Batch
    logits: Tensor
    """[wanted tokens, vocab_size] fp32: those that `Row.wanted` names, row by row. On a GPU, until the next launch."""
    draws: Draws | None = None
    """Tokens that the device has been told to sample; None until it is, and where the host samples at collect."""

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
        run_ahead: bool | None = None,
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
        self._drafter: Drafter | None = getattr(model, "drafter", None)
        self._drawer: DrawsTokens | None = HostDraws(self._drafter) if run_ahead else None
        if isinstance(model, DrawsTokens):
            self._drawer = model
        self.runs_ahead = self._drawer is not None and run_ahead is not False
        """A step may be launched before the one before is collected; its rows may hold PENDING."""
        self._is_undrawn = False
        self.is_on_host = model.is_on_host
        """Any thread may call `copy_block` and `read_window`, also beside a step, for what no step is writing."""

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
        run_ahead: bool | None = None,
        step_tokens: int = STEP_TOKENS,
        drafts: bool = False,
        progress: Progress | None = None,
    ) -> Executor:
        """Read a model folder, pack its weights and prove which row counts are bit-equal here.

        kv_bytes or num_blocks (null block included) sizes the cache; neither means 1 GiB, or on a GPU all that is free.
        device: None takes a GPU where there is one that this model and dtype run on.  invariant: a token's bits do not
        depend on its batch; False is for measuring what that costs on a GPU.  num_windows: sequences that
        can be computed at a time, where the model has windows.  replay: how windows are rebuilt after a hit; part of
        the fingerprint, for what other than "off" computes is not what a cold run would have.  run_ahead: what
        `runs_ahead` says; None is what suits the device, and on a CPU True draws at launch, as a GPU does.
        step_tokens: most of a step, for which a GPU keeps memory.  drafts: load the model's drafter, if it has one, for
        rows that want drafts.

        Raises ModelNotSupported, BadWeights, NotInvariant, NoRoom, or ValueError for a setting that cannot be.
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
            step_tokens=step_tokens,
            drafts=drafts,
        )
        windows = num_windows + 1 if opened.window else 0
        blocks = _count_blocks(opened, kv_bytes, num_blocks, windows)
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
            run_ahead=run_ahead,
        )

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Row counts proven bit-equal for this model's layers on this machine."""
        return self._model.row_tiles

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Prove the promise on the whole model and touch the memory a step uses. Only while no block is in use.

        One sequence computed whole, and in chunks ending with a decode step beside a batch mate, must give the same
        logits and the same KV in every bit.  Raises NotInvariant, BadWeights for what no token can be drawn from, and
        NoRoom.
        """
        try:
            self._prove(progress)
        except torch.OutOfMemoryError as error:
            raise NoRoom(
                f"the device ran out of memory at the first steps, which were planned for: end what else uses it, or"
                f" set kv_bytes so that less is taken ({error})"
            ) from error

    def _prove(self, progress: Progress | None) -> None:
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
            mate = Row(1, ids[: min(end - start, _PROOF_MATE_TOKENS)], 0, whole, window=windows[0])
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
    def launch(self, batch: Batch, *, masks_follow: bool = False) -> Step:
        """Compute a step.  Raises BadBatch before anything is changed.

        A GPU computes it after this returns. Where the executor runs ahead, a row may hold PENDING instead of a token
        that the step launched before is still drawing.  masks_follow: some rows' masks are not known yet; nothing is
        drawn before `draw` brings them, which must be before the next launch.
        """
        for row in batch.rows:
            if row.num_drafts:
                check_drafts(row, most=self.window.backtrack_tokens if self.window else None)
        if self._is_undrawn and any(PENDING in row.token_ids for row in batch.rows):
            raise BadBatch("the step before was not drawn: no token is on its way")
        if isinstance(self._drawer, HostDraws):
            batch = self._drawer.known(batch)
        step = Step(batch, self._forward(batch, every_row=False))
        self._is_undrawn = masks_follow
        return step if masks_follow else self.draw(step)

    @torch.inference_mode()
    def draw(self, step: Step, masks: Mapping[int, bytes] | None = None) -> Step:
        """Tell the device to draw the newest step, under these allowed masks by sequence; nothing is waited for."""
        step = step.with_masks(masks or {})
        for row in step.batch.rows if masks else ():
            if row.num_drafts:
                check_drafts(row, most=None)
        self._is_undrawn = False
        if self._drawer is None or step.draws is not None:
            return step
        return replace(step, draws=self._drawer.draw(step.batch, step.logits))

    @torch.inference_mode()
    def collect(self, step: Step) -> tuple[Sampled, ...]:
        """One token per row that wants one, in row order, and the drafts before it that were right.

        A row without usable logits says so in `problem`.  A step that was not drawn yet is drawn here, so before the
        next launch.
        """
        drawn = self.draw(step).draws if step.draws is None else step.draws
        return drawn.wait() if drawn is not None else draw_rows(step.batch, step.logits, self._drafter)

    @torch.inference_mode()
    def score(self, step: Step) -> dict[int, tuple[Scored, ...]]:
        """The logprobs of each row's targets, by sequence; nothing for a row whose logits are unusable."""
        found = {}
        for row, span in spans(step.batch):
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
    def fetch_block(self, block_id: int) -> Fetched:
        """Begin to read a block, as all steps launched so far leave it; its bytes come while the device goes on."""
        return self._model.fetch_block(block_id)

    @torch.inference_mode()
    def copy_block(self, block_id: int, place: memoryview) -> None:
        """Copy the bytes of a block to host memory; ValueError when `place` has another size, or for the null block."""
        self._model.copy_block(block_id, place)

    @torch.inference_mode()
    def write_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        """Fill a block with layout.block_bytes bytes; ValueError for any other size or for the null block."""
        self._model.write_block(block_id, payload)

    @torch.inference_mode()
    def take_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> int:
        """As `write_block`, from memory that others may write meanwhile; return the XXH3 of what the block holds."""
        return self._model.take_block(block_id, payload)

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


def _count_blocks(opened: OpenedModel, kv_bytes: int | None, num_blocks: int | None, num_windows: int) -> int:
    if kv_bytes is not None and num_blocks is not None:
        raise ValueError("give kv_bytes or num_blocks, not both")
    if kv_bytes is None and num_blocks is None and (fitting := opened.fitting_blocks(num_windows=num_windows)):
        return fitting
    count = num_blocks if num_blocks is not None else (kv_bytes or DEFAULT_KV_BYTES) // opened.layout.block_bytes
    if count < 2:
        raise NoRoom(
            f"room for {count} blocks of {opened.layout.block_bytes} bytes;"
            " at least 2 are needed (one is the null block)"
        )
    return count


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Nobody asked."""
