"""How does a Llama-family decoder turn a step's tokens into logits?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.kv.cache import KvCache
from kernels.models.bound_step import BoundStep
from kernels.models.config import ModelConfig
from kernels.models.layers import expected_shapes, load_layer, load_matrices, padded_norm, rope_table
from kernels.models.step import StepPlan
from kernels.models.weights import BadWeights, Weights
from kernels.ops.attention import AttentionRows
from kernels.ops.linear import Kernel, Linear
from kernels.ops.row_tiles import TiledLinear, probe, prove
from kernels.ops.scratch import Scratch

Progress = Callable[[str, int, int], None]

MOST_ROWS = 516
"""Row counts up to this one are proven; longer steps take several tiles."""
MOST_HEAD_ROWS = 64


class Llama:
    """Packed weights of one model on one device, and the row counts proven for them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        path: Path,
        kernel: Kernel,
        device: torch.device,
        progress: Progress,
    ) -> None:
        """Reads and packs every tensor.  Raises BadWeights naming every missing, unknown or mis-shaped tensor."""
        check_tensors(config, weights, path)
        self.config = config
        self.kernel = kernel
        self.device = device

        def fetch(name: str) -> Tensor:
            return weights.tensor(name).to(device)

        steps = config.num_layers + 2
        progress("load weights", 0, steps)
        embedding = fetch("model.embed_tokens.weight")
        head = embedding if config.tie_embeddings else fetch("lm_head.weight")
        packed_head = Linear(kernel, head.float())
        self.embedding = embedding.float() if kernel.exact else embedding.to(torch.bfloat16)
        progress("load weights", 1, steps)
        matrices = [load_matrices(0, config, fetch, kernel)]
        progress("prove row tiles", 0, 2)
        self.tiles, own = prove(kernel, matrices[0].in_order(), limit=MOST_ROWS, device=device)
        progress("prove row tiles", 1, 2)
        self.head_tiles, (head_counts,) = prove(kernel, [packed_head], limit=MOST_HEAD_ROWS, device=device)
        self.head = TiledLinear(packed_head, head_counts)
        progress("prove row tiles", 2, 2)
        for index in range(1, config.num_layers):
            matrices.append(load_matrices(index, config, fetch, kernel))
            progress("load weights", index + 2, steps)
        self.layers = [load_layer(index, config, fetch, each, own) for index, each in enumerate(matrices)]
        self.norm = padded_norm(fetch("model.norm.weight"))
        cos, sin = rope_table(config)
        self._cos, self._sin = cos.to(device), sin.to(device)
        progress("load weights", steps, steps)

    def probe(self) -> bytes:
        """The bits this machine computes with these weights, for the recipe (32 bytes)."""
        return probe(self.kernel, [*self.layers[0].weights, self.head], self.device)

    def forward(self, plan: StepPlan, cache: KvCache, attention: AttentionRows, scratch: Scratch) -> Tensor:
        """Logits of the wanted tokens, [num_wanted, vocab_size] fp32; K and V of all tokens go to the cache."""
        cache.begin(plan.begun_blocks)
        cos, sin = (table[plan.positions].repeat(1, 2)[:, None, :] for table in (self._cos, self._sin))
        step = BoundStep(self.config, self.kernel, cache, attention, plan, (cos, sin), scratch)
        step.hidden.copy_(torch.nn.functional.embedding(plan.token_ids, self.embedding))
        *layers, last = self.layers
        for index, layer in enumerate(layers):
            step.apply(index, layer)
        rows = step.finish(len(layers), last, self.norm)
        if not plan.num_wanted:
            return rows.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        logits = self.head.run(rows, plan.head_tiles, scratch)
        return logits[: plan.num_wanted].float()


def check_tensors(config: ModelConfig, weights: Weights, path: Path) -> None:
    """Raise BadWeights listing every tensor that is missing, not known, or of another shape than the config's."""
    expected = expected_shapes(config)
    present = set(weights.names())
    problems = [f"tensor {name} is missing" for name in expected if name not in present]
    problems += [
        f"tensor {name} has shape {list(weights.shape(name))}, the config asks for {list(shape)}"
        for name, shape in expected.items()
        if name in present and weights.shape(name) != shape
    ]
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    problems += [
        f"tensor {name} is not part of a {config.architecture} with this config"
        for name in sorted(present - set(expected) - ignored)
        if not name.endswith("rotary_emb.inv_freq")
    ]
    if problems:
        raise BadWeights(path, problems)
