"""Operations on rows keep a row's bits wherever it stands, and mean what their names say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops.attention import CHUNK_TOKENS, Attention, prove_rows
from kernels.ops.elementwise import PADDING, folded_sum, rms_norm, rms_norm_padded, rotate, swiglu
from kernels.ops.linear import FP16_WEIGHT, GEMM_FP32, INT8, Kernel, Linear
from kernels.ops.row_tiles import NotInvariant, RowTiles, TiledLinear, probe, prove
from kernels.ops.scratch import Scratch

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(counts=st.sets(st.integers(1, 300), min_size=1, max_size=8), rows=st.integers(0, 1500))
def test_tiles_cover_the_rows_with_proven_counts_only(counts, rows) -> None:
    """Whatever was proven, a step is cut into proven counts and no row is left out."""
    tiles = RowTiles(tuple(sorted(counts)))
    plan = tiles.plan(rows)

    assert set(plan) <= counts
    assert rows <= sum(plan) == tiles.padded(rows)
    assert sum(plan) < rows + max(counts)


def test_a_count_that_sums_in_another_order_is_left_out() -> None:
    """Counts whose rows differ in one bit never join the class; the class with a wide tile wins."""

    def pack(weight, _bias):
        def apply(rows):
            product = rows @ weight.T
            return product * (1.0 + 2.0**-22) if len(rows) in {1, 8} else product

        return apply

    kernel = Kernel("odd", torch.float64, pack, (1, 4, 8, 64))
    tiles, _ = prove(kernel, [Linear(kernel, draw(32, 16).double())], limit=64, device=CPU)
    assert not {1, 8} & set(tiles.counts)


def test_weights_share_a_padding_and_keep_their_own_tiles() -> None:
    """A weight with more proven counts than its neighbours uses one call where they need two."""

    def pack(weight, _bias):
        return lambda rows: rows @ weight.T * (1.0 + 2.0**-20 if len(rows) == 128 and len(weight) == 8 else 1.0)

    kernel = Kernel("two", torch.float64, pack, (64, 128))
    narrow, wide = (Linear(kernel, draw(out, 16).double()) for out in (8, 32))
    shared, own = prove(kernel, [narrow, wide], limit=128, device=CPU)

    assert ((64,), (64,), (64, 128)) == (shared.counts, own[0].counts, own[1].counts)
    rows = draw(128, 16, seed=5).double()
    for linear, tiles in zip((narrow, wide), own, strict=True):
        expected = torch.cat([linear.apply(rows[:64]), linear.apply(rows[64:])])
        assert torch.equal(expected, TiledLinear(linear, tiles).run(rows, shared.plan(128), Scratch(CPU)))


def test_a_kernel_that_depends_on_the_slot_is_refused() -> None:
    """When a row's bits change with its place in every tile there is nothing to fall back to."""

    def pack(weight, _bias):
        return lambda rows: rows @ weight.T + torch.arange(len(rows))[:, None]

    kernel = Kernel("slots", torch.float32, pack, (4, 64))
    with pytest.raises(NotInvariant, match="slots"):
        prove(kernel, [Linear(kernel, draw(32, 16))], limit=64, device=CPU)


def test_probe_sees_one_changed_bit() -> None:
    """Weights that differ in one element give another probe, equal ones the same."""
    weight = draw(32, 16)
    other = weight.clone()
    other[3, 5] = torch.nextafter(other[3, 5], torch.tensor(9.0))
    packed = (TiledLinear(Linear(GEMM_FP32, each), RowTiles((64,))) for each in (weight, weight, other))
    same, again, changed = (probe(GEMM_FP32, [each], CPU) for each in packed)

    assert same == again != changed


def test_fp16_weights_hold_bf16_values_exactly() -> None:
    """Kept as fp16, bf16 weights lose nothing: ordinary ones as they are, large and tiny ones behind a power of two."""
    rows = draw(64, 48)
    for scale in (1.0, 2.0**20, 2.0**-40):
        weight = (draw(32, 48, seed=1) * scale).bfloat16()
        expected = rows.double() @ weight.double().T
        got = Linear(FP16_WEIGHT, weight.float()).apply(rows).double()
        torch.testing.assert_close(expected / scale, got / scale, atol=1e-4, rtol=0)


def test_int8_weights_are_within_half_a_step() -> None:
    """The int8 setting is weight-only: identity activations read back weights rounded to 1/127 of their row's largest."""
    weight = draw(32, 64, seed=2)
    got = Linear(INT8, weight).apply(torch.eye(64, dtype=torch.bfloat16)).float().T
    step = weight.abs().amax(1, keepdim=True) / 127

    assert ((got - weight).abs() <= step * 0.51 + weight.abs() * 2.0**-8).all()


def test_elementwise_bits_do_not_depend_on_the_place() -> None:
    """Norm, rotation and gated activation of a row are the same in any company, and what torch computes."""
    scratch = Scratch(CPU)
    x, weight = draw(37, 48), draw(48, seed=1)
    cos, sin = draw(37, 1, 16, seed=2).cos(), draw(37, 1, 16, seed=2).sin()

    def norm(rows):
        return rms_norm(rows, weight, eps=1e-5, out=torch.empty_like(rows))

    def turn(rows, start):
        heads = rows.view(len(rows), 3, 16)
        at = slice(start, start + len(rows))
        return rotate(heads, cos[at], sin[at], scratch=scratch, out=torch.empty_like(heads))

    def gate(rows):
        return swiglu(rows, scratch=scratch).clone()

    whole = norm(x), turn(x, 0), gate(x)
    for start, end in ((0, 1), (5, 6), (3, 20), (36, 37)):
        part = x[start:end].clone()
        for expected, got in zip(whole, (norm(part), turn(part, start), gate(part)), strict=True):
            assert torch.equal(expected[start:end], got)
    padded = torch.zeros(37, 48 + PADDING)
    padded[:, :48], padded[:, 48] = x, (48 * 1e-5) ** 0.5
    torch.testing.assert_close(torch.rms_norm(x, (48,), weight, 1e-5), whole[0])
    torch.testing.assert_close(whole[0], rms_norm_padded(padded, weight * 48**0.5, out=torch.empty_like(x)))
    torch.testing.assert_close(torch.nn.functional.silu(x[:, :24]) * x[:, 24:], whole[2])


@pytest.mark.parametrize("rows", [8, 96])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_softmax_attention(rows, fused) -> None:
    """Over three units with the last one partly hidden, it equals torch's own."""
    queries, keys, values = draw(4, rows, 16), draw(3, 4, 128, 16, seed=1), draw(3, 4, 128, 16, seed=2)
    mask = torch.zeros(1, 1, 1, 1, 1, 128)
    mask[..., 40:] = float("-inf")
    got = Attention(queries * 0.25, keys, values, mask, fused=fused, scratch=Scratch(CPU)).run()
    flat_keys, flat_values = (each.transpose(0, 1).reshape(4, 384, 16)[:, :296] for each in (keys, values))

    expected = torch.nn.functional.scaled_dot_product_attention(queries, flat_keys, flat_values, scale=0.25)
    torch.testing.assert_close(expected, got)


def test_decode_rows_hold_the_group() -> None:
    """However many heads share a KV head, a decode token's product has room for them."""
    for group in (1, 3, 7, 16):
        rows = prove_rows(group=group, kv_heads=2, head_dim=32, device=CPU)
        assert group <= rows.decode_rows <= group * CHUNK_TOKENS


def test_scratch_gives_the_same_memory_again() -> None:
    """A name keeps its buffer while it fits, and grows when it does not."""
    scratch = Scratch(CPU)
    first = scratch.take("a", (4, 4))
    assert first.data_ptr() == scratch.take("a", (2, 8)).data_ptr()
    assert (8, 8) == tuple(scratch.take("a", (8, 8)).shape)
    assert scratch.take("a", (4, 4)).data_ptr() == scratch.take("a", (8, 8)).data_ptr()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 128, 584])
def test_folding_a_row_sums_it(size):
    """What a GPU uses instead of its own reduction: a sum, with bits that do not depend on the row's neighbours."""
    x = torch.randn(5, size)

    torch.testing.assert_close(folded_sum(x), x.sum(-1))
    assert torch.equal(folded_sum(x)[2:3], folded_sum(x[2:3]))
