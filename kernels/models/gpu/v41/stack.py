"""How do a V4.1 step's tokens become logits on a GPU? One function, run as it stands or captured in a graph."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from kernels.models.gpu.v41.layer import Layer, write_draft_windows
from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.step import Products, State, Step
from kernels.models.gpu.v41.tokens import Laid
from kernels.models.gpu.v41.weights import GpuV41Weights
from kernels.models.v41.config import V41Config
from kernels.ops.engram import compress
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_hyper import enter
from kernels.ops.hyper import STREAMS, Coefficients, first_pre
from kernels.ops.ranges import grouped


class Stack:
    """A model's layers over its blocks and windows."""

    def __init__(
        self,
        config: V41Config,
        weights: GpuV41Weights,
        records: Records,
        compressed_ids: Tensor,
        *,
        is_invariant: bool,
    ) -> None:
        """compressed_ids: [tokenizer's vocabulary] int64, on the device."""
        self._config, self._weights, self._records, self._compressed_ids = config, weights, records, compressed_ids
        self._products = Products(is_invariant)
        self.layers = tuple(Layer(config, each, layer=layer) for layer, each in enumerate(weights.layers))
        device = compressed_ids.device
        # Reads from the host's memory cross the bus while the layers before them compute.
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # torch's stub
        self._beside, self._late = Beside(device), Beside(device)

    def forward(self, laid: Laid) -> Tensor:
        """Logits of the wanted tokens, [wanted, vocab_size] fp32; records of all tokens go to blocks and windows."""
        step = self.begin(laid)
        state = self.enter(laid)
        for layer in grouped(self.layers, "layers"):
            state = layer.run(step, state)
        if self._weights.draft_windows:
            write_draft_windows(step, self._config, self._weights.draft_windows)
        wanted = laid.told.wanted
        return self.leave(state.of(wanted)) if len(wanted) else self._weights.head.new_empty(0, len(self._weights.head))

    def begin(self, laid: Laid) -> Step:
        """Start what does not depend on any layer."""
        step = Step(laid, self._records, self._products, self._beside, self._late)
        pad = self._config.engram.pad_token_id
        compressed = compress(laid.history, self._compressed_ids, pad_token_id=pad)
        # Read on the other stream: were it let go here, what comes next on this one would be given its memory.
        step.kept.append(compressed)
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside) if self._aside is not None else nullcontext():
            for layer in self.layers:
                layer.fetch(step, compressed, is_aside=self._aside is not None)
        return step

    def enter(self, laid: Laid) -> State:
        """Four copies of each token's embedding, of which the first enters the first sublayer."""
        x = self._weights.embedding[laid.token_ids]
        if laid.told.images is not None:
            tokens, embeddings = laid.told.images
            x.index_copy_(0, tokens, embeddings)
        pre = first_pre(len(x), x.device)
        # Without an output nothing asks for the other coefficients.
        return State(x.unsqueeze(1).repeat(1, STREAMS, 1), None, Coefficients(pre, pre, pre))

    def leave(self, state: State) -> Tensor:
        """Of the last layer's state: [tokens, vocab_size] fp32, never rounded."""
        last = self._weights.last
        ended = enter(state.streams, state.output, state.made, last, is_invariant=self._products.is_invariant)
        return self._products.wide(ended.x, self._weights.head)
