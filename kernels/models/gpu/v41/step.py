"""What do the layers of one step share on a GPU: its tokens, the products they use, and what was chosen so far?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.tokens import Laid
from kernels.models.gpu.v41.weights import Matrix
from kernels.ops import gpu_grouped_fp8
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, norm_rows, product, span_rows
from kernels.ops.gpu_grouped import Groups, Weights, multiply
from kernels.ops.gpu_linear import library_linear, linear
from kernels.ops.gpu_quant import norm_fp8, round_fp8, swiglu_fp8
from kernels.ops.gpu_sparse import Chosen
from kernels.ops.gpu_swiglu_rows import swiglu_rows
from kernels.ops.hyper import Coefficients

Rows = Tensor | SpanRows
"""What an fp8 product sees of [rows, size]: bf16 values, or e4m3 under one scale a row."""


@dataclass(frozen=True, slots=True)
class Products:
    """How rows are made for products, and multiplied."""

    is_invariant: bool
    """By our own tiles, so that a row's bits do not depend on the others; else by the library. In fp8 where matrices
    are."""

    def of(self, x: Rows, weight: Matrix, *, follows_rows: bool = False) -> Tensor:
        """[rows, in], [out, in] -> [rows, out] bf16.  Rows of another kind than the matrix's become its.

        follows_rows: this stream's last launch is a kernel that was launched when the matrix was there.
        """
        if isinstance(weight, RowScaled):
            restated = x if isinstance(x, SpanRows) else span_rows(x)
            return product(restated, weight, is_invariant=self.is_invariant, follows_rows=follows_rows)
        rows = x.dense().bfloat16() if isinstance(x, SpanRows) else x
        return linear(rows, weight) if self.is_invariant else library_linear(rows, weight)

    def rounded(self, x: Tensor, matrix: Matrix) -> Rows:
        """What an fp8 product by this matrix sees of [rows, size] bf16 or fp32."""
        return span_rows(x, rounds=True) if isinstance(matrix, RowScaled) else round_fp8(x)

    def normed(self, x: Tensor, weight: Tensor, matrix: Matrix, *, eps: float) -> Rows:
        """The same of rows' RMSNorm."""
        return norm_rows(x, weight, eps=eps) if isinstance(matrix, RowScaled) else norm_fp8(x, weight, eps=eps)[1]

    def gated(self, gate_up: Tensor, matrix: Matrix, *, limit: float) -> Rows:
        """The same of rows' clamped SwiGLU."""
        is_restated = isinstance(matrix, RowScaled)
        return swiglu_rows(gate_up, limit=limit) if is_restated else swiglu_fp8(gate_up, None, limit=limit)

    def wide(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same, unrounded: [rows, out] fp32."""
        return linear(x, weight, wide=True) if self.is_invariant else library_linear(x, weight, wide=True)

    def grouped(self, x: Tensor | SpanRows, weights: Weights | RowScaled, groups: Groups) -> Tensor:
        """Every group by its own matrix: [tokens, groups, in] bf16 -> [tokens, groups * out] fp32.

        x: or restated, [groups * tokens, in], one group after the other.  groups: `interleaved` of so many tokens.  The
        library's fp8 products round to bf16, which these must not.
        """
        if isinstance(x, SpanRows):
            assert isinstance(weights, RowScaled), "rows are restated for restated matrices"
            made = gpu_grouped_fp8.multiply(x, weights, groups, num_out=len(x), wide=True)
            return made.view(len(x) // weights.experts, -1)
        tokens, count, size = x.shape
        if isinstance(weights, RowScaled):
            rows = span_rows(x.view(tokens * count, size), groups.sources, span=gpu_grouped_fp8.span_of(size))
            made = gpu_grouped_fp8.multiply(rows, weights, groups, num_out=tokens * count, wide=True)
            return made.view(tokens, -1)
        if self.is_invariant or not x.is_cuda:
            made = multiply(x.view(tokens * count, size), weights, groups, num_out=tokens * count, wide=True)
            return made.view(tokens, -1)
        made = torch.bmm(x.transpose(0, 1), weights.data.transpose(1, 2), out_dtype=torch.float32)
        return made.transpose(0, 1).reshape(tokens, -1)


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

    def __init__(
        self,
        laid: Laid,
        records: Records,
        products: Products,
        beside: Beside,
        late: Beside,
    ) -> None:
        """beside: where windows' records and the shared expert are made.  late: what a sublayer's end wants."""
        self.laid, self.records, self.products, self.beside, self.late = laid, records, products, beside, late
        self.half = laid.encoder
        self.is_image = laid.is_image
        self.memories: dict[int, Fetched] = {}
        """By layer: rows of n-gram tables on their way."""
        self.kept: list[Tensor] = []
        """What another stream reads: its memory is nobody else's until the step is launched."""
        self.chosen: Chosen | None = None
        """What the newest index source chose."""
        self.candidates: list[Tensor] = []
        """Of each slab: blocks of entries that later index sources may choose from, [tokens, blocks] int32."""
        self.features: list[Tensor] = []
        """[stored tokens, hidden] bf16, for the drafter's windows."""

    @property
    def lines(self) -> Tensor:
        """Of the half's tokens: [tokens] int32 rows of the block tables; -1 for padding."""
        return self.half.lines

    def enter_decoder(self) -> None:
        """Go on with the tokens of the decoder half."""
        self.half = self.laid.decoder
        self.chosen = None
        self.candidates.clear()
        if self.is_image is not None and self.laid.told.kept is not None:
            self.is_image = self.is_image[self.laid.told.kept]
