"""How does V4.1's vision tower turn a picture into rows of the language model's width?

Patches of 14 x 14 pixels -> pre-norm blocks with full attention and two-dimensional rotary positions -> 3 x 3 patches
merged into one row -> a two-layer aligner. One picture at a time, and every sum's order follows from its size alone: a
picture's embeddings do not depend on what else is encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.models.v41.config import VisionConfig
from kernels.ops.linear import Kernel, Linear
from kernels.ops.numerics import Numerics

Fetch = Callable[[str], Tensor]
"""Name without `model.` -> tensor, fp32."""

_NORM_EPS = 1e-6
_MEAN = 0.5
_STD = 0.5


@dataclass(frozen=True, slots=True)
class _Block:
    """One transformer block's weights."""

    norm1: Tensor
    qkv: Linear
    out: Linear
    norm2: Tensor
    gate_up: Linear
    down: Linear


class VisionTower:
    """Packed weights of tower and aligner on one device."""

    def __init__(
        self, config: VisionConfig, fetch: Fetch, kernel: Kernel, numerics: Numerics, device: torch.device
    ) -> None:
        self.config = config
        self._kernel, self._numerics, self._device = kernel, numerics, device

        def linear(name: str, *, has_bias: bool = True) -> Linear:
            bias = fetch(f"{name}.bias").to(device) if has_bias else None
            return Linear(kernel, fetch(f"{name}.weight").to(device), bias)

        def vector(name: str) -> Tensor:
            return fetch(name).to(device)

        self._embed = linear("vision.patch_embed.proj")
        self._blocks = [
            _Block(
                norm1=vector(f"vision.blocks.{index}.norm1.weight"),
                qkv=linear(f"vision.blocks.{index}.attn.wqkv"),
                out=linear(f"vision.blocks.{index}.attn.wo"),
                norm2=vector(f"vision.blocks.{index}.norm2.weight"),
                gate_up=linear(f"vision.blocks.{index}.mlp.w1", has_bias=False),
                down=linear(f"vision.blocks.{index}.mlp.w2", has_bias=False),
            )
            for index in range(config.num_layers)
        ]
        self._norm = vector("vision.norm.weight")
        self._aligner = linear("aligner.w1"), linear("aligner.w2")
        self._marks = {name: vector(f"image_{name}") for name in ("start", "newline", "end")}

    def span(self, pixels: Tensor) -> Tensor:
        """Embeddings of all places an image fills: start, rows of merged patches with a newline after each, end.

        pixels: [height, width, 3] uint8, whole patches.  Returns [rows * (columns + 1) + 2, hidden] fp32.
        """
        high, wide = (size // self.config.patch_size for size in pixels.shape[:2])
        merged = self.embed(self.patches(pixels), high, wide)
        rows = merged.view(-(-high // self.config.downsample), -1, merged.shape[-1])
        newline = self._mark("newline").expand(len(rows), 1, -1)
        lines = torch.cat([rows, newline], dim=1).view(-1, merged.shape[-1])
        return torch.cat([self._mark("start"), lines, self._mark("end")])

    def patches(self, pixels: Tensor) -> Tensor:
        """Normalised patches in raster order: [height, width, 3] uint8 -> [patches, 3 * patch * patch] fp32.

        Rounded to bf16 in every numeric mode: the tower is trained on such patches.  ValueError for other sizes.
        """
        size = self.config.patch_size
        height, width, channels = pixels.shape
        if height % size or width % size or channels != 3 or not height or not width:
            raise ValueError(f"pixels {tuple(pixels.shape)} are not RGB in whole patches of {size}")
        values = ((pixels.to(self._device).float() / 255 - _MEAN) / _STD).bfloat16().float()
        cut = values.view(height // size, size, width // size, size, 3).permute(0, 2, 4, 1, 3)
        return cut.reshape(-1, 3 * size * size)

    def embed(self, patches: Tensor, high: int, wide: int) -> Tensor:
        """Merged and aligned rows in raster order: [high * wide, 3 * patch * patch] fp32 -> [merged, hidden] fp32."""
        turn = self._turns(high, wide)
        hidden = self._linear(self._embed, patches)
        for block in self._blocks:
            attended = self._attend(block, self._rms_norm(hidden, block.norm1), turn)
            hidden = self._numerics.bf16(hidden + self._linear(block.out, attended))
            gate, up = self._linear(block.gate_up, self._rms_norm(hidden, block.norm2)).chunk(2, dim=-1)
            activated = self._numerics.bf16(self._numerics.bf16(functional.silu(gate)) * up)
            hidden = self._numerics.bf16(hidden + self._linear(block.down, activated))
        merged = self._merge(self._rms_norm(hidden, self._norm), high, wide)
        first, second = self._aligner
        return self._linear(second, self._numerics.bf16(functional.gelu(self._linear(first, merged))))

    def _mark(self, name: str) -> Tensor:
        return self._marks[name].unsqueeze(0)

    def _linear(self, linear: Linear, rows: Tensor) -> Tensor:
        return self._numerics.bf16(linear.apply(rows.to(self._kernel.activation)).float())

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _NORM_EPS)
        return self._numerics.bf16(x * scale * weight)

    def _turns(self, high: int, wide: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every patch, [patches, 1, head] each: a row's angles, then a column's, then both again.

        The halves layout: dim i turns with dim i + head / 2, so the first quarter of a head tells the row.
        """
        head = self.config.hidden_size // self.config.num_heads
        steps = torch.arange(0, head // 2, 2, device=self._device).float() / (head // 2)
        frequencies = 1.0 / self.config.rope_theta**steps
        rows = torch.arange(high, device=self._device).repeat_interleave(wide).float()
        columns = torch.arange(wide, device=self._device).repeat(high).float()
        angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], dim=-1)
        return angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def _attend(self, block: _Block, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Full attention among the patches of one picture: [patches, hidden] -> the same."""
        heads = self.config.num_heads
        query, key, value = self._linear(block.qkv, x).view(len(x), 3, heads, -1).unbind(dim=1)
        cos, sin = turns

        def turned(part: Tensor) -> Tensor:
            first, second = part.chunk(2, dim=-1)
            return self._numerics.bf16(part * cos + torch.cat([-second, first], dim=-1) * sin)

        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (turned(query), turned(key), value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self._numerics.bf16(mixed[0].transpose(0, 1).reshape(len(x), -1))

    def _merge(self, x: Tensor, high: int, wide: int) -> Tensor:
        """Join squares of patches, zeros beyond the right and lower edge: [high * wide, hidden] -> [merged, features].

        Features are channel-major: channel * side * side + row * side + column.
        """
        side = self.config.downsample
        grid = x.view(high, wide, -1)
        padded = functional.pad(grid, (0, 0, 0, -wide % side, 0, -high % side))
        squares = padded.view(padded.shape[0] // side, side, padded.shape[1] // side, side, -1)
        return squares.permute(0, 2, 4, 1, 3).reshape(-1, grid.shape[-1] * side * side)
