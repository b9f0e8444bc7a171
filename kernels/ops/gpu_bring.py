"""How do a product's weights come into the L2 while what runs before it leaves the memory idle?

An attention, or rows that are rounded between two products, read next to nothing, and the product behind them begins
with weights that lie in the device's memory. They are asked for meanwhile by programs that wait for nothing: a launch
beside others, or an attention's last ones when they have their keys. No value is read or written.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.ops.gpu_launch import INTERPRETED, check, tiles

PLACES: frozenset[str] = frozenset()
"""Where that is done: those of `ALL` that are worth it, which a measurement must show first."""
ALL = frozenset({"wo_a", "wo_b", "down", "shared"})
"""wo_a by the attention before it, wo_b while wo_a's rows are rounded, an attention's first matrix and the experts'
router and shared expert while streams are mixed."""
ALIGNED_BYTES = 16
"""What is asked for begins and ends at multiples of this."""
_PIECE_BYTES = 4096
_THREADS = 32
"""Of a program that does nothing else."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each thread of some programs asks for."""

    data: Tensor
    """Bytes."""
    size: int
    piece_bytes: int


def wanted(place: str, weights: Tensor) -> Tensor | None:
    """The bytes of these weights where they are to be brought for this place, and a GPU can be asked."""
    check(place in ALL, f"{place} is none of {sorted(ALL)}")
    if place not in PLACES or INTERPRETED or not weights.is_cuda:
        return None
    check(weights.is_contiguous() and weights.data_ptr() % ALIGNED_BYTES == 0, "what is brought lies end to end")
    return weights.view(torch.uint8).view(-1)


def bring(*many: Tensor | None) -> None:
    """Ask for all of these bytes on the current stream, which does not wait until they are there."""
    for data in many:
        if data is not None and (size := _whole(data)):
            programs = tiles(size, _PIECE_BYTES * _THREADS)
            bring_kernel[(programs,)](data, size, _PIECE_BYTES, THREADS=_THREADS, num_warps=_THREADS // 32)


def shared_by(threads: int, data: Tensor) -> Share:
    """In so many pieces of one size, the last of which may be short or nothing."""
    size = _whole(data)
    return Share(data, size, tiles(size, threads * ALIGNED_BYTES) * ALIGNED_BYTES)


def _whole(data: Tensor) -> int:
    """A last few bytes come with their line when they are read."""
    return data.nbytes // ALIGNED_BYTES * ALIGNED_BYTES


@gluon.jit
def bring_share(
    data: gl.tensor, size: gl.tensor, piece_bytes: gl.tensor, share: gl.tensor, THREADS: gl.constexpr
) -> None:
    """By the threads of some warps, a piece each of one program's share; one below 0 is nobody's."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [THREADS // 32], [0])
    at = (share.to(gl.int64) * THREADS + gl.arange(0, THREADS, layout=LINE)) * piece_bytes
    asks = (at >= 0) & (at < size)
    ask(data + gl.where(asks, at, 0), gl.where(asks, gl.minimum(size - at, piece_bytes), 0).to(gl.int32))


@gluon.jit
def ask(at: gl.tensor, sizes: gl.tensor) -> None:
    """Have so many bytes from each place on brought into the L2, in the time of an instruction.

    sizes: int32 multiples of 16; nothing is asked for where it is not positive.
    """
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred some;
        setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [at, sizes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def bring_kernel(data: gl.tensor, size: gl.tensor, piece_bytes: gl.tensor, THREADS: gl.constexpr) -> None:
    bring_share(data, size, piece_bytes, gl.program_id(0), THREADS)
