"""The one door to the device: load a model, compute batches, move blocks in and out.

Only the engine thread that owns the block pool calls an executor. `launch` hands a step to the device and `collect`
waits for it and samples, so that the next step can be planned in between; on a CPU the device is this thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels.batch import Batch, Row, Sampled
from kernels.kv.cache import KvCache
from kernels.kv.layout import KvLayout
from kernels.models.config import ModelConfig, read_config
from kernels.models.llama import Llama
from kernels.models.step import StepPlan, StepPlanner
from kernels.models.weights import open_weights
from kernels.ops.allocator import keep_freed_memory
from kernels.ops.attention import prove_rows
from kernels.ops.linear import Kernel, choose, plain
from kernels.ops.row_tiles import NotInvariant
from kernels.ops.sampler import Draw, UnusableLogits, sample
from kernels.ops.scratch import Scratch

Dtype = Literal["bf16", "fp32", "int8"]
Progress = Callable[[str, int, int], None]

DEFAULT_KV_BYTES = 1 << 30
_RECIPE = "dense-1"
_PROOF_TOKENS = 150
_PROOF_SPLITS = (0, 37, 38, 130, 149)


@dataclass(frozen=True, slots=True)
class Step:
    """A launched batch. Collect it before the next but one is launched."""

    batch: Batch
    logits: Tensor
    """[sampled rows, vocab_size] fp32."""


class Executor:
    """One model on one device, with its KV blocks."""

    def __init__(self, model: Llama, layout: KvLayout, num_blocks: int, *, threads: int, weights_digest: bytes) -> None:
        """`load` is the way in."""
        device, config = model.device, model.config
        self.config: ModelConfig = config
        self.layout = layout
        self.num_blocks = num_blocks
        self.threads = threads
        self._attention = prove_rows(
            group=config.group, kv_heads=config.num_kv_heads, head_dim=config.head_dim, device=device
        )
        self.recipe = _recipe(model, layout, self._attention.bits)
        self.fingerprint = hashlib.sha256(
            b"fathom.model.1" + weights_digest + layout.digest() + self.recipe.encode()
        ).digest()
        self._model = model
        self._scratch = Scratch(device)
        self._cache = KvCache(layout, num_blocks, device)
        self._planner = StepPlanner(
            layout,
            tiles=model.tiles,
            head_tiles=model.head_tiles,
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
            max_position_tokens=config.max_position_tokens,
            device=device,
        )

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        model_dir: Path,
        *,
        dtype: Dtype,
        kv_bytes: int | None = None,
        num_blocks: int | None = None,
        block_tokens: int = 128,
        threads: int = 2,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Executor:
        """Read a model folder, pack its weights and prove which row counts are bit-equal here.

        kv_bytes or num_blocks (null block included) sizes the cache; neither means 1 GiB.  Raises ModelNotSupported,
        BadWeights, NotInvariant, or ValueError for a setting that cannot be.
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        report = progress or _silent
        where = torch.device(device)
        kernel = choose(dtype, where)
        config = read_config(model_dir)
        layout = KvLayout.dense(
            num_layers=config.num_layers,
            block_tokens=block_tokens,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="fp32" if dtype == "fp32" else "bf16",
        )
        blocks = _count_blocks(layout, kv_bytes, num_blocks)
        weights = open_weights(model_dir, report)
        digest = weights.digest()

        def build(kernel: Kernel) -> Llama:
            return Llama(config, weights, model_dir, kernel, where, report)

        try:
            model = build(kernel)
        except NotInvariant:
            if plain(kernel).name == kernel.name:
                raise
            model = build(plain(kernel))
        return cls(model, layout, blocks, threads=threads, weights_digest=digest)

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Row counts proven bit-equal for this model's layers on this machine."""
        return self._model.tiles.counts

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Prove the promise on the whole model and touch the memory a step uses. Only while no block is in use.

        One sequence computed whole, and in chunks ending with a decode step beside a batch mate, must give the same
        logits and the same KV in every bit.  Raises NotInvariant.
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
        report("warm up", 0, len(splits) + 1)
        expected = self.logits(Batch((Row(0, ids, 0, whole),)))[0]
        got = expected
        for done, (start, end) in enumerate(zip(splits, [*splits[1:], tokens], strict=True)):
            report("warm up", done + 1, len(splits) + 1)
            mate = Row(1, ids[start:end], start, whole)
            got = self.logits(Batch((mate, Row(0, ids[start:end], start, cut))))[1]
        same_kv = all(self.read_block(a) == self.read_block(b) for a, b in zip(whole, cut, strict=True))
        if not torch.equal(expected, got) or not same_kv:
            raise NotInvariant(f"{self.recipe}: a prompt computed whole and in chunks differs on this machine")
        for block_id in (*whole, *cut):
            self.write_block(block_id, bytes(self.layout.block_bytes))
        report("warm up", len(splits) + 1, len(splits) + 1)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Step:
        """Compute a step.  Raises BadBatch before anything is changed."""
        return Step(batch, self._forward(self._planner.plan(batch)))

    @torch.inference_mode()
    def collect(self, step: Step) -> tuple[Sampled, ...]:
        """One token per row that wants one, in row order. A row without usable logits says so in `problem`."""
        rows = [row for row in step.batch.rows if row.sampling]
        draws = [_draw(row) for row in rows]
        problems: dict[int, str] = {}
        try:
            choices = sample(step.logits, draws)
        except UnusableLogits as error:
            problems = error.reasons
            fine = [index for index in range(len(rows)) if index not in problems]
            choices = sample(step.logits[fine], [draws[index] for index in fine])
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
    def logits(self, batch: Batch) -> Tensor:
        """Compute a step and return each row's last logits, sampled or not: [rows, vocab_size] fp32."""
        return self._forward(self._planner.plan(batch, every_row=True))

    @torch.inference_mode()
    def read_block(self, block_id: int) -> bytes:
        """The bytes of a block, as `layout` describes them."""
        return self._cache.read_block(block_id)

    @torch.inference_mode()
    def write_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        """Fill a block with layout.block_bytes bytes; ValueError for any other size or for the null block."""
        self._cache.write_block(block_id, payload)

    def _forward(self, plan: StepPlan) -> Tensor:
        # OpenMP's thread count belongs to the calling thread, and load may have run in another.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return self._model.forward(plan, self._cache, self._attention, self._scratch)


def _recipe(model: Llama, layout: KvLayout, attention_bits: bytes) -> str:
    """Everything that decides a bit: which arithmetic, which library, and a hash of what it computes here."""
    bits = hashlib.sha256(model.probe() + attention_bits).hexdigest()[:16]
    return (
        f"{_RECIPE} kernel={model.kernel.name} attention=fp32x128 kv={layout.streams[0].dtype}"
        f" device={model.device.type} torch={torch.__version__} bits={bits}"
    )


def _count_blocks(layout: KvLayout, kv_bytes: int | None, num_blocks: int | None) -> int:
    if kv_bytes is not None and num_blocks is not None:
        raise ValueError("give kv_bytes or num_blocks, not both")
    count = num_blocks if num_blocks is not None else (kv_bytes or DEFAULT_KV_BYTES) // layout.block_bytes
    if count < 2:
        raise ValueError(
            f"room for {count} blocks of {layout.block_bytes} bytes; at least 2 are needed (one is the null block)"
        )
    return count


def _draw(row: Row) -> Draw:
    assert row.sampling is not None, "only rows that want a token are drawn for"
    return Draw(row.sampling, row.position + len(row.token_ids), row.history, row.num_prompt_tokens, row.allowed_mask)


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Nobody asked."""
