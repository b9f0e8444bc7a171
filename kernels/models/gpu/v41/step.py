"""What do the layers of one step share on a GPU: its tokens, the products they use, and what was chosen so far?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.tokens import Laid
from kernels.ops.gpu_grouped import Groups, Weights, multiply
from kernels.ops.gpu_linear import library_linear, linear
from kernels.ops.gpu_sparse import Chosen
from kernels.ops.hyper import Coefficients


@dataclass(frozen=True, slots=True)
class Products:
    """How rows are multiplied by bf16 matrices."""

    is_invariant: bool
    """By our own tiles, so that a row's bits do not depend on the others; else by the library."""

    def of(self, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, in] bf16, [out, in] bf16 -> [rows, out] bf16."""
        return linear(x, weight) if self.is_invariant else library_linear(x, weight)

    def wide(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same, unrounded: [rows, out] fp32."""
        return linear(x, weight, wide=True) if self.is_invariant else library_linear(x, weight, wide=True)

    def grouped(self, x: Tensor, weights: Weights, groups: Groups) -> Tensor:
        """Every group by its own matrix: [tokens, groups, in] bf16 -> [tokens, groups * out] fp32.

        groups: `interleaved` of so many tokens.
        """
        tokens, count, size = x.shape
        if self.is_invariant or not x.is_cuda:
            made = multiply(x.view(tokens * count, size), weights, groups, num_out=tokens * count, wide=True)
            return made.view(tokens, -1)
        made = torch.bmm(x.transpose(0, 1), weights.data.transpose(1, 2), out_dtype=torch.float32)
        return made.transpose(0, 1).reshape(tokens, -1)


def interleaved(tokens: int, count: int, device: torch.device) -> Groups:
    """Rows of [tokens, count] by the second index, each of them in the order of tokens."""
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=device) * tokens
    rows = torch.arange(tokens * count, dtype=torch.int32, device=device).view(tokens, count).t().reshape(-1)
    return Groups(ends, rows, rows)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Rows of an n-gram table that are read beside the step's own work."""

    rows: Tensor
    """[tokens, parts * size] bf16."""
    arrived: torch.cuda.Event | None
    """None: they are there."""

    def wait(self) -> Tensor:
        """The rows, for kernels that are launched from now on; the host does not wait."""
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
        return self.rows


@dataclass(frozen=True, slots=True)
class State:
    """The streams between two sublayers: the output of the one before is not in them yet."""

    streams: Tensor
    """[tokens, 4, hidden] bf16."""
    output: Tensor | None
    """[tokens, hidden] bf16; None before the first sublayer."""
    made: Coefficients
    """Of the sublayer that made the output."""

    def of(self, rows: Tensor) -> State:
        """The same of some tokens."""
        return State(
            self.streams[rows], None if self.output is None else self.output[rows], coefficients_of(self.made, rows)
        )


def coefficients_of(made: Coefficients, rows: Tensor) -> Coefficients:
    """Of some tokens."""
    return Coefficients(made.pre[rows], made.post[rows], made.mix[rows])


class Step:
    """One batch on its way through the layers."""

    def __init__(self, laid: Laid, records: Records, products: Products, *, num_groups: int) -> None:
        """num_groups: of heads, before the attention's output."""
        self.laid, self.records, self.products = laid, records, products
        self.half = laid.encoder
        self.is_image = laid.is_image
        self.memories: dict[int, Fetched] = {}
        """By layer: rows of n-gram tables on their way."""
        self.chosen: Chosen | None = None
        """What the newest index source chose."""
        self.candidates: list[Tensor] = []
        """Of each slab: blocks of entries that later index sources may choose from, [tokens, blocks] int32."""
        self.features: list[Tensor] = []
        """[stored tokens, hidden] bf16, for the drafter's windows."""
        self._num_groups = num_groups
        self._groups: Groups | None = None

    @property
    def groups(self) -> Groups:
        """Of the half's rows of heads."""
        if self._groups is None:
            self._groups = interleaved(self.half.extent.num_tokens, self._num_groups, self.half.positions.device)
        return self._groups

    def enter_decoder(self) -> None:
        """Go on with the tokens of the decoder half."""
        self.half = self.laid.decoder
        self.chosen = self._groups = None
        self.candidates.clear()
        if self.is_image is not None and self.laid.told.kept is not None:
            self.is_image = self.is_image[self.laid.told.kept]
