"""The dense models' kernels give what their twins in torch give."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.ops.gpu_attention import (
    LONG_PART_TOKENS,
    PART_TOKENS,
    Shape,
    attend,
    part_tokens,
    tokens_per_tile,
    twin_attend,
)
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_linear import Tile, linear, linear_parts, linear_swiglu, twin_linear
from kernels.ops.gpu_norm import add_rms_norm, twin_add_rms_norm
from kernels.ops.gpu_rope_cache import Heads, Paging, Turning, rope_and_store, twin_rope_and_store
from kernels.ops.gpu_step import fill_tokens, twin_fill_tokens, update_tables
from kernels.ops.gpu_swiglu import swiglu, twin_swiglu


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Where there is one; elsewhere Triton interprets."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def paging(*, num_blocks: int, block_tokens: int, heads: Heads, rows: int, most: int) -> Paging:
    """Random blocks, dealt out to table rows 1.. in random order; what a table does not use is NaN."""
    layer = bf16(num_blocks, 2, block_tokens, heads.num_kv_heads * heads.head_dim)
    tables = torch.zeros(rows + 1, most, dtype=torch.int32)
    tables[1:] = (1 + torch.randperm(num_blocks - 1)[: rows * most]).view(rows, most).int()
    return Paging(layer, tables)


@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (1, 576), (3, 100)])
def test_a_norm_equals_its_twin(rows: int, hidden: int) -> None:
    """With and without something to add; the residual stream is updated in place."""
    weight, bias = bf16(hidden), bf16(hidden)
    for added, offset in ((None, None), (bf16(rows, hidden), None), (torch.randn(3, rows, hidden), bias)):
        residual = bf16(rows, hidden, scale=3.0)
        same = residual.clone()
        expected = twin_add_rms_norm(added, residual, weight, eps=1e-5, bias=offset)
        with interpreted():
            got = add_rms_norm(added, same, weight, eps=1e-5, bias=offset)
        torch.testing.assert_close(residual, same, rtol=0.02, atol=0.02)
        torch.testing.assert_close(expected, got, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("rows", "ffn"), [(0, 8), (2, 1030), (5, 160)])
def test_swiglu_equals_its_twin(rows: int, ffn: int) -> None:
    """Odd widths too."""
    gate_up = bf16(rows, 2 * ffn, scale=4.0)
    with interpreted():
        got = swiglu(gate_up)
    torch.testing.assert_close(twin_swiglu(gate_up), got, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "extras"), [(Heads(6, 2, 16), True), (Heads(3, 1, 64), False)])
def test_rope_and_store_equals_its_twin(heads: Heads, extras: bool) -> None:
    """Keys and values land in their blocks, and nothing else in the cache changes: padding rows store nothing."""
    tokens, half = 5, heads.head_dim // 2
    place = paging(num_blocks=9, block_tokens=16, heads=heads, rows=2, most=3)
    angles = torch.rand(48, half) * 6
    turning = Turning(angles.cos(), angles.sin())
    if extras:
        turning = Turning(angles.cos(), angles.sin(), bf16(heads.row_size), bf16(2, heads.head_dim), 1e-6)
    qkv = bf16(tokens, heads.row_size)
    rows = torch.tensor([1, 1, 0, 2, 2], dtype=torch.int32)
    positions = torch.tensor([15, 16, 0, 47, 3], dtype=torch.int32)
    for parts in (qkv, torch.stack([qkv.float() / 4, qkv.float() / 4, qkv.float() / 2])):
        cache = Paging(place.layer.clone(), place.tables)
        expected = Paging(place.layer.clone(), place.tables)
        queries = twin_rope_and_store(parts, rows, positions, heads, turning, expected)
        with interpreted():
            got = rope_and_store(parts, rows, positions, heads, turning, cache)
        torch.testing.assert_close(queries, got, rtol=0.02, atol=0.02)
        torch.testing.assert_close(expected.layer, cache.layer, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "block_tokens", "lengths"),
    [(Heads(6, 2, 16), 16, ((1, 0), (9, 30), (1, 70))), (Heads(2, 2, 32), 128, ((3, 260), (1, 0), (1, 520)))],
)
def test_attention_equals_its_twin(heads: Heads, block_tokens: int, lengths: tuple[tuple[int, int], ...]) -> None:
    """Chunks and single tokens, (new tokens, tokens before them): every part boundary, poison beyond the end."""
    most = 640 // block_tokens
    place = paging(num_blocks=3 * most + 1, block_tokens=block_tokens, heads=heads, rows=3, most=most)
    shape = Shape(rows=16)
    most_tokens = tokens_per_tile(heads, shape)
    tiles, token = [], 0
    for row, (count, position) in enumerate(lengths, 1):
        end = position + count
        place.layer.view(-1, 2, block_tokens, heads.num_kv_heads * heads.head_dim)
        for beyond in range(end, min(end + 200, most * block_tokens)):
            place.layer[place.tables[row, beyond // block_tokens], :, beyond % block_tokens] = float("nan")
        for offset in range(0, count, most_tokens):
            taken = min(most_tokens, count - offset)
            tiles.append((row, token + offset, taken, position + offset))
        token += count
    queries = bf16(token, heads.num_heads * heads.head_dim)
    told = torch.tensor(tiles, dtype=torch.int32)
    with interpreted():
        got = attend(queries, told, heads, place, shape=shape)
    torch.testing.assert_close(twin_attend(queries, told, heads, place), got, rtol=0.02, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [3])
def test_sharing_keys_among_programs_changes_no_bit(splits: int) -> None:
    """Decode tokens alone or split, with padding rows whose output is zeros."""
    heads = Heads(4, 2, 16)
    place = paging(num_blocks=20, block_tokens=128, heads=heads, rows=3, most=6)
    tiles = torch.tensor(
        [(1, 0, 1, 0), (2, 1, 1, 2 * PART_TOKENS + 5), (3, 2, 1, PART_TOKENS - 1), (0, 3, 0, 0)], dtype=torch.int32
    )
    queries = bf16(4, heads.num_heads * heads.head_dim)
    with interpreted():
        whole = attend(queries, tiles, heads, place, shape=Shape(rows=16))
        shared = attend(queries, tiles, heads, place, splits=splits, shape=Shape(rows=16))
    assert torch.equal(whole, shared)
    assert not whole[3].any()
    torch.testing.assert_close(twin_attend(queries, tiles, heads, place), whole, rtol=0.02, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "has_sinks", "part"), [(0, True, 128), (100, True, 128), (150, False, 256)])
def test_windows_and_sinks_equal_the_twin_in_any_cut(window: int, has_sinks: bool, part: int) -> None:
    """A chunk, its tokens alone, and their keys shared out give the same bits; what left every window is never read."""
    heads, before, count, block_tokens = Heads(3, 1, 16), 290, 5, 16
    place = paging(num_blocks=42, block_tokens=block_tokens, heads=heads, rows=2, most=20)
    for at in range(320):
        if at >= before + count or (window and at <= before - window):
            place.layer[place.tables[1, at // block_tokens], :, at % block_tokens] = float("nan")
    queries = bf16(count + 2, heads.num_heads * heads.head_dim)
    sinks = torch.randn(heads.num_heads) * 2 if has_sinks else None
    shape = Shape(rows=16)
    most = tokens_per_tile(heads, shape)
    chunk = [(1, at, min(most, count - at), before + at) for at in range(0, count, most)]
    others = [(2, count, 1, 3), (0, count + 1, 0, 0)]
    singles = torch.tensor([(1, at, 1, before + at) for at in range(count)] + others, dtype=torch.int32)

    expected = twin_attend(queries, singles, heads, place, window=window, sinks=sinks)
    with interpreted():
        whole = attend(
            queries,
            torch.tensor(chunk + others, dtype=torch.int32),
            heads,
            place,
            shape=shape,
            part=part,
            window=window,
            sinks=sinks,
        )
        shared = attend(queries, singles, heads, place, splits=2, shape=shape, part=part, window=window, sinks=sinks)

    torch.testing.assert_close(expected, whole, rtol=0.02, atol=0.01)
    assert torch.equal(whole, shared)
    assert not whole[-1].any()


def test_long_parts_are_for_steps_that_fill_the_device() -> None:
    """Of Llama-8B's steps all measured ones but a lone sequence; never fewer for more sequences or longer ones."""
    assert PART_TOKENS == part_tokens(1, 8, 1024)
    assert {LONG_PART_TOKENS} == {part_tokens(*step) for step in ((8, 8, 8192), (64, 8, 1024), (256, 8, 1024))}
    lengths = [part_tokens(count, 8, context) for context in (100, 1000, 9000) for count in (1, 2, 30, 1000)]
    assert all(a <= b for at in (0, 4, 8) for a, b in zip(lengths[at : at + 4], lengths[at + 1 : at + 4], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 40, 96), (17, 33, 64), (0, 8, 32)])
def test_linear_equals_its_twin_whatever_the_tile(rows: int, columns: int, depth: int) -> None:
    """Odd rows, columns and depths; with the gate fused as well."""
    x, weight = bf16(rows, depth), bf16(2 * columns, depth, scale=depth**-0.5)
    for tile in (Tile(16, 16, 32, 4, 2), Tile(32, 16, 64, 4, 2)):
        with interpreted():
            narrow, wide = linear(x, weight, tile=tile), linear(x, weight, wide=True, tile=tile)
            gated = linear_swiglu(x, weight, tile=tile)
            parts = linear_parts(x, weight, parts=2, tile=tile)
        torch.testing.assert_close(linear_parts(x, weight, parts=2, tile=tile), parts, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(twin_linear(x, weight), narrow, rtol=0.02, atol=0.02)
        torch.testing.assert_close(twin_linear(x, weight, wide=True), wide, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(twin_swiglu(twin_linear(x, weight)), gated, rtol=0.05, atol=0.02)


def test_tokens_to_come_and_padding_are_laid_out_like_the_twin() -> None:
    """A token of a step that still runs is taken from where the sampler puts it; padding belongs to table row 0."""
    told = torch.full((4, 300), 77, dtype=torch.int32)
    told[0, :3] = torch.tensor([5, -1 - 2, 9])
    told[3, 0] = 3
    sampled = torch.tensor([11, 12, 13], dtype=torch.int32)
    results = []
    for kernel in (False, True):
        ids = torch.full((260,), -9, dtype=torch.int64)
        rows, positions = torch.full((2, 260), -9, dtype=torch.int32)
        tiles = torch.full((260, 4), -9, dtype=torch.int32)
        with interpreted():
            (fill_tokens if kernel else twin_fill_tokens)(told, sampled, ids, rows, positions, tiles)
        results.append((ids, rows, positions, tiles))
    assert [5, 13, 9, 0] == results[0][0][:4].tolist()
    assert [0, 3, 0, 0] == results[0][3][3].tolist()
    assert all(torch.equal(twin, kernel) for twin, kernel in zip(*results, strict=True))


def test_single_table_entries_are_set() -> None:
    """And nothing else."""
    tables = torch.arange(1200, dtype=torch.int32).view(3, 400)
    changes = torch.stack([torch.randperm(1200)[:300].int(), torch.full((300,), -5, dtype=torch.int32)], 1)
    expected = tables.clone()
    expected.view(-1)[changes[:, 0].long()] = changes[:, 1]
    with interpreted():
        update_tables(tables, changes)
    assert torch.equal(expected, tables)
