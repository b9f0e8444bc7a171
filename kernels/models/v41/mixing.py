"""How do the four streams of a token enter a sublayer, and what becomes of its output?"""

from __future__ import annotations

from torch import Tensor

from kernels.models.v41.attention import normed
from kernels.models.v41.config import V41Config
from kernels.models.v41.matrices import Source, product
from kernels.ops.hyper import Coefficients, coefficients, collapse, mean_square, spread, update
from kernels.ops.numerics import Numerics


class Mixing:
    """The hyper-connections of one sublayer, and the norm before it."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics, *, sublayer: str) -> None:
        """source: of the layer's weights.  sublayer: "attn" or "ffn"."""
        self._config, self._numerics = config, numerics
        self._product = source.packer.pack(source.tensor(f"hc_{sublayer}_fn"))
        self._base = source.tensor(f"hc_{sublayer}_base")
        self._scale = spread(source.tensor(f"hc_{sublayer}_scale"))
        self._norm = source.tensor(f"{sublayer}_norm.weight")

    def enter(self, streams: Tensor, pre: Tensor) -> Tensor:
        """The sublayer's input: [tokens, 4, hidden], [tokens, 4] of the sublayer before -> [tokens, hidden]."""
        mixed = self._numerics.bf16(collapse(streams, pre))
        return normed(mixed, self._norm, self._config.norm_eps, self._numerics)

    def coefficients(self, streams: Tensor) -> Coefficients:
        """Of the streams before the sublayer; never rounded."""
        config = self._config
        return coefficients(
            product(self._product, streams.flatten(1)),
            mean_square(streams),
            scale=self._scale,
            base=self._base,
            eps=config.norm_eps,
            hc_eps=config.hc_eps,
            iterations=config.sinkhorn_iters,
        )

    def leave(self, streams: Tensor, output: Tensor, made: Coefficients) -> Tensor:
        """The streams after the sublayer: a new [tokens, 4, hidden]."""
        return self._numerics.bf16(update(streams, output, made))
