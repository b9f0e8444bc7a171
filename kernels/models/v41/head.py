"""How do a token's final streams, or a drafter's hidden state, become logits?"""

from __future__ import annotations

from torch import Tensor

from kernels.models.v41.attention import normed
from kernels.models.v41.config import V41Config
from kernels.models.v41.matrices import MOST_HEAD_ROWS, Source, product
from kernels.ops.hyper import collapse
from kernels.ops.numerics import Numerics


class Head:
    """The final norm and the matrix of the vocabulary."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics) -> None:
        """source: of the model's own weights."""
        self._eps, self._numerics = config.norm_eps, numerics
        self._norm = source.tensor("norm.weight")
        self._matrix = source.matrix("head", limit=MOST_HEAD_ROWS)

    def run(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Logits of tokens: [n, 4, hidden], [n, 4] -> [n, vocab_size] fp32."""
        return self.logits(self.hidden(streams, pre))

    def hidden(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Normalised states: [n, 4, hidden], [n, 4] -> [n, hidden] fp32."""
        mixed = self._numerics.bf16(collapse(streams, pre))
        return normed(mixed, self._norm, self._eps, self._numerics)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of normalised states: [n, hidden] -> [n, vocab_size] fp32, never rounded."""
        return product(self._matrix, hidden)
