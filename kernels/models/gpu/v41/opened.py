"""How does a V4.1 folder become a model on a GPU: is it one that the kernels take, does it fit, and what is loaded?"""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.memory_plan import STEP_TOKENS, MemoryPlan
from kernels.models.config import ModelNotSupported
from kernels.models.gpu.memory import as_planned, free_bytes, reserve
from kernels.models.gpu.v41.graphs import SIZES, contexts_up_to
from kernels.models.gpu.v41.memory import choose_experts, v41_need
from kernels.models.gpu.v41.model import MOST_SEQUENCES, GpuV41
from kernels.models.gpu.v41.weights import ExpertFormat, Loader
from kernels.models.model import Progress
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.models.v41.folder import V41Folder
from kernels.ops.gpu_grouped import DEPTH
from kernels.ops.gpu_index import CANDIDATES, ENTRIES
from kernels.ops.numerics import QUANT

_PLANNED_WINDOWS = 257
"""Window slots that room is left for while nobody has said how many there will be."""
_LEAST_HEAD = 64


class OpenedGpuV41(V41Folder):
    """A V4.1 folder for the model of GPU kernels."""

    def __init__(
        self,
        model_dir: Path,
        *,
        block_tokens: int | None,
        device: torch.device,
        progress: Progress,
        invariant: bool = True,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """step_tokens: most of a step, for which memory is kept.

        Raises ModelNotSupported, BadWeights, or ValueError for a setting that cannot be.
        """
        config = read_v41_config(model_dir)
        check_supported(config)
        super().__init__(model_dir, config, numerics=QUANT, block_tokens=block_tokens, progress=progress)
        self._device, self._progress, self._is_invariant = device, progress, invariant
        self._step_tokens = step_tokens

    def fitting_blocks(self) -> int:
        if self._device.type != "cuda":
            return 0
        return self.plan(None, num_windows=_PLANNED_WINDOWS)[1].num_blocks

    def plan(self, num_blocks: int | None, *, num_windows: int) -> tuple[ExpertFormat, MemoryPlan]:
        """What of the device's free memory goes where, and how experts are kept.  Raises NoRoom.

        num_blocks: None takes as many as fit.  num_windows: the null window included.
        """
        kinds: tuple[ExpertFormat, ...] = ("fp4", "bf16")
        needs = {
            kind: v41_need(
                self._config,
                self.layout,
                kind,
                step_tokens=self._step_tokens,
                num_windows=num_windows,
                num_sequences=MOST_SEQUENCES,
                graph_sizes=SIZES,
                graph_contexts=contexts_up_to(self._config.index_topk, self._config.max_position_tokens),
            )
            for kind in kinds
        }
        return choose_experts(
            needs, free=free_bytes(self._device), block_bytes=self.layout.block_bytes, num_blocks=num_blocks
        )

    def build(self, *, num_blocks: int, num_windows: int) -> GpuV41:
        """Say how memory is used, or raise NoRoom before anything is loaded; afterwards all of it is this process's."""
        if self._device.type != "cuda":
            return self._build("fp4", num_blocks, num_windows)
        experts, plan = self.plan(num_blocks, num_windows=num_windows)
        self._progress(f"{plan.describe()}; experts in {experts}", 1, 1)
        with as_planned(plan):
            model = self._build(experts, num_blocks, num_windows)
            reserve(self._device, plan.workspace)
        return model

    def _build(self, experts: ExpertFormat, num_blocks: int, num_windows: int) -> GpuV41:
        weights = Loader(self._config, self._checkpoint, self._device, experts=experts).load()
        return GpuV41(
            self._config,
            weights,
            self._compressed_ids,
            self.layout,
            num_blocks=num_blocks,
            num_windows=num_windows,
            device=self._device,
            is_invariant=self._is_invariant,
        )


def check_supported(config: V41Config) -> None:
    """Raise ModelNotSupported for shapes the kernels do not take."""
    head, index = config.head_dim, config.index_dim
    group_size = config.num_heads // config.o_groups * head
    rules = {
        f"head_dim {head} is a power of two of at least {_LEAST_HEAD}": head >= _LEAST_HEAD and not head & (head - 1),
        f"index_head_dim {index} is a power of two of at least {_LEAST_HEAD}": index >= _LEAST_HEAD
        and not index & (index - 1),
        f"index_n_heads {config.index_heads} is a power of two": not config.index_heads & (config.index_heads - 1),
        f"hidden_size {config.hidden_size} is a multiple of {DEPTH}": config.hidden_size % DEPTH == 0,
        f"a group of heads, {group_size} values, is a multiple of {DEPTH}": group_size % DEPTH == 0,
        f"candidate_block_size {config.candidate_block_size} divides {ENTRIES}": ENTRIES % config.candidate_block_size
        == CANDIDATES % config.candidate_block_size
        == 0,
        "index_topk is a power of two": not config.index_topk & (config.index_topk - 1),
        "the drafter's features are those of decoder layers": all(
            layer >= config.num_encoder_layers for layer in config.drafter.target_layers
        ),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ModelNotSupported("the GPU's kernels want that " + "; ".join(broken))
