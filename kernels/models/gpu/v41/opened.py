"""How does a V4.1 folder become a model on a GPU: is it one that the kernels take, does it fit, and what is loaded?"""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.memory_plan import STEP_TOKENS, MemoryPlan, check_host, gib
from kernels.models.config import ModelNotSupported
from kernels.models.gpu.memory import as_pinned, as_planned, available_host_bytes, free_bytes, reserve
from kernels.models.gpu.v41.drafter import DrafterLoader
from kernels.models.gpu.v41.expert_weights import ExpertFormat, in_registers
from kernels.models.gpu.v41.graphs import SIZES, contexts_up_to
from kernels.models.gpu.v41.memory import choose_experts, table_bytes, unpacks, v41_need
from kernels.models.gpu.v41.model import MOST_SEQUENCES, GpuV41
from kernels.models.gpu.v41.weights import Loader
from kernels.models.model import Progress
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.models.v41.folder import V41Folder
from kernels.ops.gpu_grouped import DEPTH
from kernels.ops.gpu_index import CANDIDATES, ENTRIES
from kernels.ops.gpu_launch import is_hopper
from kernels.ops.numerics import QUANT

_TABLES = "n-gram tables"
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
        drafts: bool = False,
    ) -> None:
        """step_tokens: most of a step, for which memory is kept.  drafts: load the drafter too.

        Raises ModelNotSupported, BadWeights, or ValueError for a setting that cannot be.
        """
        config = read_v41_config(model_dir)
        check_supported(config)
        super().__init__(model_dir, config, numerics=QUANT, block_tokens=block_tokens, progress=progress)
        self._device, self._progress, self._is_invariant = device, progress, invariant
        self._step_tokens = step_tokens
        self._in_registers = in_registers(config, device)
        self._dense_in_fp8 = not invariant or (device.type == "cuda" and is_hopper(device))
        self._has_drafter = drafts and config.drafter.num_layers > 0

    def fitting_blocks(self, *, num_windows: int) -> int:
        if self._device.type != "cuda":
            return 0
        return self.plan(None, num_windows=num_windows)[1].num_blocks

    def plan(self, num_blocks: int | None, *, num_windows: int) -> tuple[ExpertFormat, MemoryPlan]:
        """What of the device's free memory goes where, and how experts are kept.  Raises NoRoom.

        num_blocks: None takes as many as fit.  num_windows: the null window included.
        """
        kinds: tuple[ExpertFormat, ...] = ("fp4",) if self._in_registers else ("fp4", "fp8")
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
                has_drafter=self._has_drafter,
                is_invariant=self._is_invariant,
                dense_in_fp8=self._dense_in_fp8,
                in_registers=self._in_registers,
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
        pinned = table_bytes(self._config)
        check_host(pinned, available=available_host_bytes(), what=_TABLES)
        experts, plan = self.plan(num_blocks, num_windows=num_windows)
        self._progress(f"{plan.describe()}; experts in {experts}; host memory: {gib(pinned)} {_TABLES}", 1, 1)
        with as_planned(plan), as_pinned(pinned, _TABLES):
            model = self._build(experts, num_blocks, num_windows)
            reserve(self._device, plan.workspace)
        return model

    def _build(self, experts: ExpertFormat, num_blocks: int, num_windows: int) -> GpuV41:
        config, checkpoint, device, is_invariant = self._config, self._checkpoint, self._device, self._is_invariant
        has_room = unpacks(
            config,
            experts,
            step_tokens=self._step_tokens,
            experts_here=config.moe.num_experts,
            is_invariant=is_invariant,
            in_registers=self._in_registers,
        )
        weights = Loader(
            config, checkpoint, device, experts=experts, is_invariant=is_invariant, unpacks=has_room
        ).load()
        drafter, notes = None, weights.notes
        if self._has_drafter:
            loader = DrafterLoader(config, checkpoint, device, experts=experts, is_invariant=is_invariant)
            drafter, notes = loader.load_drafter(), (*notes, *loader.notes())
        for note in notes:
            self._progress(note, 1, 1)
        return GpuV41(
            self._config,
            weights,
            self._compressed_ids,
            self.layout,
            num_blocks=num_blocks,
            num_windows=num_windows,
            device=self._device,
            is_invariant=self._is_invariant,
            step_tokens=self._step_tokens,
            drafter=drafter,
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
