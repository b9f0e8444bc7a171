"""How does a Llama-family model look to the executor? Its weights, its block cache, and no windows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from kernels.batch import Batch
from kernels.kv.cache import KvCache
from kernels.kv.layout import KvLayout
from kernels.kv.window import WindowSpec
from kernels.models.config import ModelConfig, read_config
from kernels.models.doors import BlockOnlyDoor
from kernels.models.llama import Llama
from kernels.models.model import Dtype, Progress
from kernels.models.step import StepPlanner
from kernels.models.weights import open_weights
from kernels.ops.attention import prove_rows
from kernels.ops.linear import Kernel, choose, plain
from kernels.ops.row_tiles import NotInvariant
from kernels.ops.scratch import Scratch

_RECIPE = "dense-1"
DEFAULT_BLOCK_TOKENS = 128


class DenseModel(BlockOnlyDoor):
    """One dense decoder with its blocks."""

    window: WindowSpec | None = None
    preceding_tokens = 0

    def __init__(self, model: Llama, layout: KvLayout, num_blocks: int) -> None:
        device, config = model.device, model.config
        self.info: ModelConfig = config
        self.layout = layout
        self._attention = prove_rows(
            group=config.group, kv_heads=config.num_kv_heads, head_dim=config.head_dim, device=device
        )
        self._model = model
        self._scratch = Scratch(device)
        self.cache = KvCache(layout, num_blocks, device)
        self._planner = StepPlanner(
            layout,
            tiles=model.tiles,
            head_tiles=model.head_tiles,
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
            max_position_tokens=config.max_position_tokens,
            device=device,
        )

    @property
    def row_tiles(self) -> tuple[int, ...]:
        return self._model.tiles.counts

    def numeric_recipe(self) -> str:
        model = self._model
        bits = hashlib.sha256(model.probe() + self._attention.bits).hexdigest()[:16]
        return (
            f"{_RECIPE} kernel={model.kernel.name} attention=fp32x128 kv={self.layout.streams[0].dtype}"
            f" device={model.device.type} torch={torch.__version__} bits={bits}"
        )

    def forward(self, batch: Batch, *, every_row: bool) -> Tensor:
        plan = self._planner.plan(batch, every_row=every_row)
        return self._model.forward(plan, self.cache, self._attention, self._scratch)


class OpenedDense:
    """A Llama-family folder."""

    window: WindowSpec | None = None

    def __init__(
        self, model_dir: Path, *, dtype: Dtype, block_tokens: int | None, device: torch.device, progress: Progress
    ) -> None:
        """Raises ModelNotSupported, BadWeights, or ValueError for a setting that cannot be."""
        self._path, self._device, self._progress = model_dir, device, progress
        self._kernel = choose(dtype, device)
        self._config = read_config(model_dir)
        self.layout = KvLayout.dense(
            num_layers=self._config.num_layers,
            block_tokens=block_tokens or DEFAULT_BLOCK_TOKENS,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            dtype="fp32" if dtype == "fp32" else "bf16",
        )
        self._weights = open_weights(model_dir, progress)

    def weights_digest(self) -> bytes:
        return self._weights.digest()

    def fitting_blocks(self, *, num_windows: int) -> int:  # noqa: ARG002 - the host's memory is not planned
        return 0

    def build(self, *, num_blocks: int, num_windows: int) -> DenseModel:  # noqa: ARG002 - it has no windows
        """Fall back to the plain kernel where the packed one is not invariant."""

        def read(kernel: Kernel) -> Llama:
            return Llama(self._config, self._weights, self._path, kernel, self._device, self._progress)

        try:
            model = read(self._kernel)
        except NotInvariant:
            if plain(self._kernel).name == self._kernel.name:
                raise
            model = read(plain(self._kernel))
        return DenseModel(model, self.layout, num_blocks)
