"""How are a dense model's layers cut among the programs of the one kernel that does a decode step of a few tokens?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.ops.gpu_launch import power_of_two

PROGRAMS = 128
"""Of 132 multiprocessors of an H200: what the dimensions of models divide by."""
MOST_ROWS = 8
_COLUMNS, _DEPTH, _PARTS, _HALF = 64, 256, 4, 128
_LEAST_STAGES = 3
_SHARED_BYTES, _UNIT_BYTES, _CHUNK_BYTES, _SPARE_BYTES = 227 * 1024, 32768, 2048, 2560
_STAGES, _NEAR, _HAS_FEEDER = 5, 2, True
"""Units of a ring, how many of them a feeder keeps on their way, and whether there is one: frozen by measurement
(bench/NOTES.md). Without a feeder all of a ring is on its way, and 3 are faster than 5."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What the kernel knows when it is compiled."""

    layers: int
    hidden: int
    inner: int
    """Query heads x their dims."""
    rows_qkv: int
    ffn: int
    kv_heads: int
    block_tokens: int
    programs: int
    stages: int
    """Units that a program's ring holds."""
    splits: int
    """Programs that share a sequence's keys of one KV head."""
    has_feeder: bool = False
    """Units are fetched by a warp of its own, not by those that compute."""
    near: int = 0
    """Units that the feeder keeps on their way, at most."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.inner // _HALF // self.kv_heads

    @property
    def pairs(self) -> int:
        """Tiles of the gate, each with its tile of up, of one program."""
        return -(-self.ffn // _COLUMNS // self.programs)

    @property
    def gating(self) -> int:
        """Programs that have any."""
        return self.ffn // _COLUMNS // self.pairs

    @property
    def other_units(self) -> int:
        """A program's units of a layer beside keys, gate and up."""
        groups, unit = self.programs // _PARTS, _PARTS * _DEPTH
        qkv = self.rows_qkv // _COLUMNS // groups * (self.hidden // unit)
        return qkv + self.hidden // _COLUMNS // groups * (self.inner // unit + self.ffn // unit)

    @property
    def chunks(self) -> int:
        """Most of a product's input that a program holds, in pieces of 128."""
        return power_of_two(max(self.hidden // _HALF, self.ffn // _PARTS // _HALF, self.inner // _PARTS // _HALF))

    @property
    def most_stages(self) -> int:
        """That fit into a multiprocessor's shared memory."""
        return (_SHARED_BYTES - _SPARE_BYTES - self.chunks * _CHUNK_BYTES) // _UNIT_BYTES


def cut_for(
    rows: int,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    block_tokens: int,
    programs: int = PROGRAMS,
) -> Cut | None:
    """None where the kernel does not take these dimensions, or so many rows."""
    inner, group = heads * head_dim, heads // kv_heads
    rows_qkv, groups = (heads + 2 * kv_heads) * head_dim, programs // _PARTS
    room = power_of_two(rows)
    fits = (
        1 <= rows <= MOST_ROWS
        and head_dim == _HALF
        and group <= MOST_ROWS - 2
        and not block_tokens % _COLUMNS
        and not any(size % (_PARTS * _DEPTH) for size in (hidden, inner, ffn))
        and not any(size % (_COLUMNS * groups) for size in (hidden, rows_qkv))
        and not programs % (room * kv_heads)
    )
    if not fits:
        return None
    splits = programs // (room * kv_heads)
    cut = Cut(layers, hidden, inner, rows_qkv, ffn, kv_heads, block_tokens, programs, 0, splits, _HAS_FEEDER)
    stages = min(_STAGES, cut.most_stages)
    if stages < _LEAST_STAGES or (ffn // _COLUMNS) % cut.pairs:
        return None
    return replace(cut, stages=stages, near=min(_NEAR, stages))
