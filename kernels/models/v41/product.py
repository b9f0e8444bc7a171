"""How does any number of rows pass through a matrix whose kernel is proven for some row counts only?"""

from __future__ import annotations

from torch import Tensor

from kernels.ops.row_tiles import TiledLinear
from kernels.ops.scratch import Scratch


def multiply(linear: TiledLinear, rows: Tensor, scratch: Scratch) -> Tensor:
    """Rows [n, in] fp32 -> [n, out] fp32. n may be 0.

    The rows are padded to the matrix's tiles and the padding's products cut off.  The next product may overwrite the
    result.
    """
    count = len(rows)
    if not count:
        return rows.new_zeros(0, linear.linear.out_features)
    tiles = linear.tiles.plan(count)
    return linear.run(_padded(rows, sum(tiles), scratch), tiles, scratch)[:count]


def _padded(rows: Tensor, size: int, scratch: Scratch) -> Tensor:
    if len(rows) == size:
        return rows.contiguous()
    padded = scratch.take("product.rows", (size, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    return padded  # what is left of other products in the padding is finite or not, but meets no row of this one
