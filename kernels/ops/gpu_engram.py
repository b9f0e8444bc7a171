"""How does n-gram memory reach a GPU's streams: rows found, fetched from the host's memory, and let in through a gate?

The tables (100 GB each at real size) stay in pinned host memory; a kernel reads a token's 24 rows over the bus itself.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.engram import HashTables
from kernels.ops.engram import gate as gate_twin
from kernels.ops.engram import table_rows as table_rows_twin
from kernels.ops.gpu_formats import bf16, e4m3_value, power
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels
from kernels.ops.hyper import STREAMS
from kernels.ops.quant import dequantise_fp8_rows


@dataclass(frozen=True, slots=True)
class HashNumbers:
    """One layer's hash tables, as a kernel reads them: all int64 on the device."""

    multipliers: Tensor
    """[window]."""
    primes: Tensor
    offsets: Tensor
    """[(window - 1) * heads] each, lengths first."""

    @classmethod
    def of(cls, tables: HashTables, device: torch.device) -> HashNumbers:
        flat = [prime for primes in tables.primes for prime in primes]
        numbers = (tables.multipliers, flat, tables.offsets)
        return cls(*(torch.tensor(each, dtype=torch.int64, device=device) for each in numbers))


def table_rows(compressed: Tensor, numbers: HashNumbers) -> Tensor:
    """Rows of a layer's table for each window: [tokens, window] -> [tokens, (window - 1) * heads] int64."""
    tokens, window = compressed.shape
    check(compressed.dtype == torch.int64 and compressed.is_contiguous(), "windows are int64, end to end")
    parts = len(numbers.primes)
    if not runs_kernels(compressed):
        heads = parts // (window - 1)
        primes = numbers.primes.view(window - 1, heads).tolist()
        tables = HashTables(
            tuple(map(tuple, primes)), tuple(numbers.offsets.tolist()), tuple(numbers.multipliers.tolist())
        )
        return table_rows_twin(compressed, tables)
    out = torch.empty(tokens, parts, dtype=torch.int64, device=compressed.device)
    _rows_kernel[(tokens,)](
        compressed,
        numbers.multipliers,
        numbers.primes,
        numbers.offsets,
        out,
        WINDOW=window,
        PARTS=parts,
        BLOCK=power_of_two(parts),
        HEADS=parts // (window - 1),
        num_warps=1,
    )
    return out


def read_rows(rows: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    """Rows of a table, joined: [tokens, parts] int64 -> [tokens, parts * size] bf16, exactly what is stored.

    data: [rows, size] uint8 e4m3 bits.  scale: [rows, size / 32] uint8 exponents.  Both may be pinned host memory.
    """
    tokens, parts = rows.shape
    size = data.shape[1]
    check(data.dtype == torch.uint8 and scale.shape == (len(data), size // 32), "a table has a scale for every 32")
    if not runs_kernels(rows):
        flat = rows.flatten().to(data.device)
        values = dequantise_fp8_rows(data[flat].view(torch.float8_e4m3fn), scale[flat].view(torch.float8_e8m0fnu))
        return values.view(tokens, -1).bfloat16()
    out = torch.empty(tokens, parts * size, dtype=torch.bfloat16, device=rows.device)
    _read_kernel[(tokens, parts)](rows, data, scale, out, SIZE=size, num_warps=1)
    return out


def add_memory(streams: Tensor, read: Tensor, weight: Tensor, is_image: Tensor | None, *, eps: float) -> Tensor:
    """The streams with the memory added, each by its own gate: [tokens, 4, hidden] bf16, new.

    read: [tokens, 5 * hidden] bf16: a key for every stream, then the value.  weight: [4, hidden] fp32, query weight
    times key weight.  is_image: [tokens] bool, tokens that stay as they are; None = none.
    """
    tokens, _, hidden = streams.shape
    check(streams.dtype == torch.bfloat16 and streams.is_contiguous() and read.is_contiguous(), "bf16, end to end")
    if not runs_kernels(streams):
        wide, both = streams.float(), read.float().view(tokens, STREAMS + 1, hidden)
        opened = gate_twin(wide, both[:, :STREAMS].contiguous(), weight=weight, eps=eps)
        added = (wide + opened.unsqueeze(-1) * both[:, STREAMS:]).bfloat16()
        return added if is_image is None else torch.where(is_image[:, None, None], streams, added)
    out = torch.empty_like(streams)
    _memory_kernel[(tokens, STREAMS)](
        streams,
        read,
        weight,
        weight if is_image is None else is_image,
        out,
        eps * hidden,
        math.sqrt(hidden),
        HIDDEN=hidden,
        BLOCK=power_of_two(hidden),
        IMAGES=is_image is not None,
        num_warps=8 if hidden > 2048 else 1,
    )
    return out


@triton.jit
def _rows_kernel(
    compressed: tl.tensor,
    multipliers: tl.tensor,
    primes: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    length = part // HEADS + 1
    hashed = tl.zeros((BLOCK,), tl.int64) + tl.load(compressed + token * WINDOW) * tl.load(multipliers)
    for older in tl.static_range(1, WINDOW):
        mixed = tl.load(compressed + token * WINDOW + older) * tl.load(multipliers + older)
        hashed = tl.where(length >= older, hashed ^ mixed, hashed)
    prime = tl.load(primes + part, mask=part < PARTS, other=1)
    row = hashed % prime + tl.load(offsets + part, mask=part < PARTS, other=0)
    tl.store(out + token * PARTS + part, row, mask=part < PARTS)


@triton.jit
def _read_kernel(rows: tl.tensor, data: tl.tensor, scale: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    row = tl.load(rows + place)
    group = tl.arange(0, SIZE // 32)[:, None]
    column = group * 32 + tl.arange(0, 32)[None, :]
    values = e4m3_value(tl.load(data + row * SIZE + column)) * power(tl.load(scale + row * (SIZE // 32) + group))
    tl.store(out + place * SIZE + column, values.to(tl.bfloat16))


@triton.jit
def _memory_kernel(
    streams: tl.tensor,
    read: tl.tensor,
    weight: tl.tensor,
    is_image: tl.tensor,
    out: tl.tensor,
    added_square: tl.tensor,
    root: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IMAGES: tl.constexpr,
) -> None:
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mine = column < HIDDEN
    place = (token * 4 + stream) * HIDDEN + column
    own = tl.load(streams + place, mask=mine, other=0.0).to(tl.float32)
    key = tl.load(read + (token * 5 + stream) * HIDDEN + column, mask=mine, other=0.0).to(tl.float32)
    value = tl.load(read + (token * 5 + 4) * HIDDEN + column, mask=mine, other=0.0).to(tl.float32)
    weighed = own * tl.load(weight + stream * HIDDEN + column, mask=mine, other=0.0) * key
    lengths = tl.sqrt_rn(tl.sum(own * own, axis=0) + added_square)
    lengths *= tl.sqrt_rn(tl.sum(key * key, axis=0) + added_square)
    score = tl.sum(weighed, axis=0) / lengths * root
    rooted = tl.sqrt_rn(tl.maximum(tl.abs(score), 1e-6))
    rooted = tl.where(score > 0, rooted, tl.where(score < 0, -rooted, 0.0))
    opened = 1.0 / (1.0 + tl.exp(-rooted))
    values = bf16(own + opened * value)
    if IMAGES:
        values = tl.where(tl.load(is_image + token), own, values)
    tl.store(out + place, values.to(tl.bfloat16), mask=mine)
