"""Models with random weights made on the GPU: the real shapes, without their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu_shapes import GPU_SHAPES
from kernels.executor import Executor
from kernels.models.config import ModelConfig, parse_config
from kernels.models.gpu.dense import GpuDense, OpenedGpuDense
from kernels.models.gpu.weights import GpuWeights, load_weights
from kernels.models.layers import expected_shapes


class RandomWeights:
    """Seeded bf16 values, made where they are used."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._shapes = expected_shapes(config)
        self._device = device

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shapes))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        generator = torch.Generator(self._device).manual_seed(seed)
        shape = self._shapes[name]
        values = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        return 1.0 + 0.1 * values if name.endswith("norm.weight") else values.mul_(float(shape[-1]) ** -0.5)

    def digest(self) -> bytes:
        return hashlib.sha256(b"random").digest()


class RandomModel:
    """One set of weights, from which executors with different settings are made."""

    def __init__(self, name: str, folder: Path, device: str = "cuda") -> None:
        raw = GPU_SHAPES[name]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(raw))
        self.config = parse_config(raw, {})
        self._folder, self._device = folder, torch.device(device)
        source = RandomWeights(self.config, device)
        self._opened = OpenedGpuDense(
            folder, block_tokens=None, device=self._device, progress=lambda *_: None, weights=source
        )
        with torch.inference_mode():
            self._weights: GpuWeights = load_weights(self.config, source, self._device, lambda *_: None)

    @torch.inference_mode()
    def executor(self, num_blocks: int, *, invariant: bool) -> Executor:
        """Its blocks hold random keys and values."""
        model = GpuDense(self.config, self._weights, self._opened.layout, num_blocks, self._device, invariant=invariant)
        executor = Executor(
            model,
            model_dir=self._folder,
            num_blocks=num_blocks,
            num_windows=0,
            replay="off",
            threads=1,
            weights_digest=self._opened.weights_digest(),
            invariant=invariant,
        )
        for index in range(self.config.num_layers):
            model.cache.layer(index).normal_()  # a past that nobody computed
        return executor
