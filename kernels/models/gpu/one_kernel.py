"""When does a decode step of a few tokens pass through all layers in one kernel?

On an H200 (or what has as many multiprocessors) whose tensor engine and matrix unit are Hopper's, for models whose
dimensions the kernel takes; elsewhere there is a kernel for each product. See docs/adr/0019.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.models.config import ModelConfig
from kernels.models.gpu.weights import GpuLayer, GpuWeights
from kernels.ops.gpu_layer_cut import MOST_ROWS, PROGRAMS, Cut, cut_for
from kernels.ops.gpu_layers import Scratch, Stacks, joined, run_layers
from kernels.ops.gpu_rope_cache import Paging

_HOPPER = (9, 0)


class OneKernel:
    """A model's layers, one launch for a step of at most MOST_ROWS sequences' single tokens."""

    def __init__(self, config: ModelConfig, weights: GpuWeights, layers: Sequence[Paging], stacks: Stacks) -> None:
        self._config, self._stacks, self._paging = config, stacks, layers
        self._turning = weights.layers[0].turning
        self._device = weights.embedding.device
        self._cuts: dict[int, Cut] = {}
        self._scratch: dict[int, Scratch] = {}

    @classmethod
    def where_it_runs(cls, config: ModelConfig, weights: GpuWeights, layers: Sequence[Paging]) -> OneKernel | None:
        """None if device, dimensions or weights are not what it takes."""
        if not (weights.embedding.is_cuda and can_meet(weights.embedding.device)):
            return None
        stacks = stacks_of(weights)
        if stacks is None or _cut(config, layers[0].block_tokens, MOST_ROWS) is None:
            return None
        made = cls(config, weights, layers, stacks)
        return made if made._starts() else None

    def layers(self, token_ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """As `gpu_layers.run_layers`: normalised rows [tokens, hidden] for the head."""
        count = len(token_ids)
        if count not in self._cuts:
            cut = _cut(self._config, self._paging[0].block_tokens, count)
            assert cut is not None, "what takes the most rows takes fewer"
            self._cuts[count], self._scratch[count] = cut, Scratch.of(cut, self._device)
        return run_layers(
            token_ids,
            rows,
            positions,
            self._stacks,
            self._turning,
            self._paging,
            self._scratch[count],
            self._cuts[count],
            eps=self._config.norm_eps,
        )

    def _starts(self) -> bool:
        """Try a step of padding, which stores nothing. A driver that cannot keep all programs resident refuses here."""
        nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)  # what failed before is not this kernel's
        try:
            self.layers(nothing.long(), nothing, nothing)
        except RuntimeError as error:
            if "cooperative" not in str(error):
                raise
            return False  # others hold multiprocessors for good: a share of the device, not the whole one
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise RuntimeError(
                "the one kernel of a decode step did not end: its programs did not meet, or it read what is not there."
                " invariant=True has a kernel for each product"
            ) from error
        return True


def can_meet(device: torch.device) -> bool:
    """All programs of the kernel are resident at once, each on a multiprocessor of its own."""
    told = torch.cuda.get_device_properties(device)
    return torch.cuda.get_device_capability(device) == _HOPPER and told.multi_processor_count >= PROGRAMS


def stacks_of(weights: GpuWeights) -> Stacks | None:
    """The layers' matrices as one each; None where they do not lie so, or have what the kernel does not do."""
    layers = weights.layers
    if any(_has_extras(layer) for layer in layers):
        return None
    norms = [norm for layer in layers for norm in (layer.attention_norm, layer.ffn_norm)]
    found = [
        joined([layer.qkv for layer in layers]),
        joined([layer.output for layer in layers]),
        joined([layer.gate_up for layer in layers]),
        joined([layer.down for layer in layers]),
        joined([norm[None] for norm in (*norms, weights.norm)]),
    ]
    qkv, output, gate_up, down, norm = found
    if qkv is None or output is None or gate_up is None or down is None or norm is None:
        return None
    return Stacks(qkv, output, gate_up, down, norm, weights.embedding)


def _has_extras(layer: GpuLayer) -> bool:
    return any(each is not None for each in (layer.output_bias, layer.turning.bias, layer.turning.qk_norm))


def _cut(config: ModelConfig, block_tokens: int, rows: int) -> Cut | None:
    return cut_for(
        rows,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn_size,
        block_tokens=block_tokens,
    )
