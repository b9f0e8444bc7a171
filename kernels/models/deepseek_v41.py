"""How does DeepSeek-V4.1 look to the executor? Its weights, its blocks and windows, and a step through its layers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kernels.batch import Batch
from kernels.kv.layout import KvLayout
from kernels.kv.window import WindowSpec
from kernels.models.config import ModelNotSupported
from kernels.models.doors import WindowDoor
from kernels.models.drafter import Drafter
from kernels.models.model import Dtype, Progress
from kernels.models.v41.cache import V41Cache
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.models.v41.folder import V41Folder
from kernels.models.v41.layout import compressor_ring_tokens, window_spec
from kernels.models.v41.matrices import Packer, Source
from kernels.models.v41.plan import V41Planner
from kernels.models.v41.slots import WindowSlots
from kernels.models.v41.step import Step, Watch
from kernels.models.v41.weights import V41Weights
from kernels.ops.engram import compress
from kernels.ops.hyper import STREAMS, first_pre
from kernels.ops.linear import Kernel, choose, plain
from kernels.ops.numerics import KVQ, QUANT, Numerics
from kernels.ops.row_tiles import NotInvariant
from kernels.ops.scratch import Scratch

_RECIPE = "deepseek-v41-1"
NUMERICS = {"fp32": KVQ, "bf16": QUANT}
"""Setting -> where values are rounded. Products sum in fp32 in both: fp8, fp4 and bf16 weights are exact there."""


class DeepseekV41(WindowDoor):
    """The language model with its caches."""

    def __init__(self, weights: V41Weights, layout: KvLayout, *, num_blocks: int, num_windows: int) -> None:
        """num_blocks, num_windows: null block and null window counted."""
        config, device = weights.config, weights.device
        self.info: V41Config = config
        self.layout = layout
        self.spec = window_spec(config, layout)
        self.window: WindowSpec | None = self.spec
        self.preceding_tokens = config.engram.max_ngram - 1
        self.weights = weights
        self.embedding, self.head = weights.embedding, weights.head
        """The drafter uses them too."""
        self.cache = V41Cache(
            config, layout, weights.numerics, num_blocks=num_blocks, num_windows=num_windows, device=device
        )
        self._slots = WindowSlots(self.spec, num_windows=num_windows, block_tokens=config.block_tokens)
        self._planner = V41Planner(
            config,
            self._slots,
            num_blocks=num_blocks,
            pair_ring_tokens=compressor_ring_tokens(config),
            device=device,
        )
        self._scratch = Scratch(device)
        self.drafter: Drafter | None = None
        """For rows that want drafts, if it was loaded."""

    @property
    def row_tiles(self) -> tuple[int, ...]:
        return self.weights.packer.counts

    def numeric_recipe(self) -> str:
        return f"{_RECIPE} {self.weights.numeric_recipe()}"

    def forward(self, batch: Batch, *, every_row: bool, watch: Watch | None = None) -> Tensor:
        """watch: sees, and may replace, named intermediates."""
        weights = self.weights
        plan = self._planner.plan(batch, every_row=every_row)
        self.cache.begin(plan.begun_blocks)
        step = Step(plan, self.cache, weights.numerics, weights.ropes, watch)
        streams, pre = self._streams(step)
        history = compress(plan.history, weights.compressed_ids, pad_token_id=self.info.engram.pad_token_id)
        features: list[Tensor] = []
        for layer in weights.layers:
            streams, pre = layer.run(step, streams, pre, history, features, self._scratch)
        if weights.draft_windows:
            weights.draft_windows.run(step, features)
        for row in batch.rows:
            self._slots.advance(row)
        streams, pre = step.seen("stream_final", streams), step.seen("pre_final", pre)
        return weights.head.run(streams[plan.wanted], pre[plan.wanted])

    def _streams(self, step: Step) -> tuple[Tensor, Tensor]:
        """Four copies of each token's embedding, and the weights that mix them at first."""
        x = torch.nn.functional.embedding(step.plan.token_ids, self.weights.embedding)
        if step.plan.images is not None:
            indices, embeddings = step.plan.images
            x[indices] = embeddings
        x = step.seen("embedding", self.weights.numerics.bf16(x))
        return x.unsqueeze(1).repeat(1, STREAMS, 1), first_pre(len(x), x.device)


class OpenedV41(V41Folder):
    """A V4.1 folder for the model of torch operations."""

    def __init__(
        self,
        model_dir: Path,
        *,
        numerics: Numerics,
        block_tokens: int | None,
        device: torch.device,
        progress: Progress,
        drafts: bool = False,
    ) -> None:
        """drafts: load the drafter too.

        Raises ModelNotSupported, BadWeights, or ValueError for a setting that cannot be.
        """
        config = read_v41_config(model_dir)
        super().__init__(model_dir, config, numerics=numerics, block_tokens=block_tokens, progress=progress)
        self._numerics, self._device = numerics, device
        self._has_drafter = drafts and config.drafter.num_layers > 0

    def fitting_blocks(self, *, num_windows: int) -> int:  # noqa: ARG002 - the host's memory is not planned
        return 0

    def build(self, *, num_blocks: int, num_windows: int) -> DeepseekV41:
        """Fall back to the plain kernel where the packed one is not invariant."""
        kernel = choose("fp32", self._device)
        try:
            weights = self._read(kernel)
        except NotInvariant:
            if plain(kernel).name == kernel.name:
                raise
            weights = self._read(plain(kernel))
        model = DeepseekV41(weights, self.layout, num_blocks=num_blocks, num_windows=num_windows)
        if self._has_drafter:
            model.drafter = self._drafter(model)
        return model

    def _drafter(self, model: DeepseekV41) -> Drafter:
        """Packed apart from the model, whose recipe knows nothing of it: drafts change no token."""
        config, weights = self._config, model.weights
        assert weights.draft_windows is not None, "who drafts has windows"
        return Drafter(
            config,
            Source(self._checkpoint, Packer(choose("fp32", self._device), self._device), "mtp."),
            self._numerics,
            windows=weights.draft_windows,
            rings=model.cache.rings[config.num_layers :],
            embedding=model.embedding,
            head=model.head,
            rope=weights.ropes.plain,
        )

    def _read(self, kernel: Kernel) -> V41Weights:
        return V41Weights(self._config, self._checkpoint, self._compressed_ids, self._numerics, kernel, self._device)


def numerics_of(dtype: Dtype) -> Numerics:
    """ModelNotSupported for a setting this model has no numerics for."""
    if dtype not in NUMERICS:
        raise ModelNotSupported(f"dtype {dtype!r}: V4.1's weights are fp8 and fp4 already; use bf16 or fp32")
    return NUMERICS[dtype]
