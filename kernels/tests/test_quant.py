"""The fp8 and fp4 formats: every byte of the golden records, and weights that survive a round trip."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops.numerics import EXACT, KVQ, QUANT
from kernels.ops.quant import (
    Codec,
    Fp32Record,
    IndexFp4,
    MainFp4,
    WindowFp8,
    dequantise_fp4_weight,
    dequantise_fp8_rows,
    dequantise_fp8_weight,
    fp8_round_trip,
    quantise_fp4_weight,
    quantise_fp8_rows,
    quantise_fp8_weight,
)
from kernels.tests.golden_files import golden

FORMATS = (("window528", WindowFp8(512)), ("main288", MainFp4(512)), ("index68", IndexFp4(128)))
LADDER = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "codec"), FORMATS)
def test_records_are_the_golden_bytes(name: str, codec: Codec) -> None:
    """Zeros, values below the floor, ties and saturation: every byte, and what the bytes mean."""
    records = codec.encode(golden("codec.x").float()[:, : codec.dim])

    assert int(name[-3:].lstrip("nwx")) == codec.record_bytes == codec.data_bytes + codec.scale_bytes
    assert torch.equal(golden(f"codec.{name}"), records)
    assert torch.equal(golden(f"codec.{name}.value"), codec.decode(records))


@pytest.mark.parametrize("codec", [*(codec for _, codec in FORMATS), Fp32Record(96)])
def test_a_record_does_not_depend_on_its_neighbours(codec: Codec) -> None:
    """A record written or read alone is the same as in a crowd, also out of a wider buffer, and none is none."""
    x = draw(37, codec.dim) * torch.logspace(-6, 3, 37).unsqueeze(1)
    wide = torch.zeros(37, codec.record_bytes + 3, dtype=torch.uint8)
    wide[:, 1:-2] = codec.encode(x)
    values = codec.decode(wide[:, 1:-2])

    for start, end in ((0, 0), (0, 1), (5, 6), (3, 20), (36, 37)):
        records = codec.encode(x[start:end].clone())
        assert torch.equal(wide[start:end, 1:-2], records)
        assert torch.equal(values[start:end], codec.decode(records))


def test_every_fp8_and_fp4_value_is_read_back() -> None:
    """What a format can hold it holds exactly: all e4m3 values, all pairs of e2m1 values."""
    fp8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    fp8 = fp8[~fp8.isnan()]
    rows = torch.cat([fp8.unsqueeze(1), torch.full((len(fp8), 1), 448.0), torch.zeros(len(fp8), 30)], dim=1)
    assert torch.equal(rows, WindowFp8(32).decode(WindowFp8(32).encode(rows)))

    signed = torch.cat([LADDER, -LADDER])
    pairs = torch.cartesian_prod(signed, signed)
    rows = torch.cat([pairs, torch.full((256, 1), 6.0), torch.zeros(256, 29)], dim=1)
    assert torch.equal(rows, IndexFp4(32).decode(IndexFp4(32).encode(rows)))
    assert torch.equal(rows, MainFp4(32).decode(MainFp4(32).encode(rows)))


@settings(max_examples=60, deadline=None)
@given(value=st.floats(-8.0, 8.0, width=32))
def test_fp4_rounds_to_the_nearest_and_ties_to_even(value: float) -> None:
    """Under a scale of one, a value becomes the nearest of the sixteen; half way, the one with the even code."""
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1] = max(min(value, 6.0), -6.0), 6.0
    distance = (LADDER - row[0, 0].abs()).abs()
    nearest = [code for code in range(8) if distance[code] == distance.min()]
    expected = LADDER[min(nearest, key=lambda code: code % 2)].copysign(row[0, 0])

    assert expected == IndexFp4(32).decode(IndexFp4(32).encode(row))[0, 0]


def test_an_activation_is_what_its_window_record_would_hold() -> None:
    """The rounding before a matrix product and the window record are one format, whatever the shape."""
    x = draw(6, 4, 128) * 3.0
    codec = WindowFp8(128)

    assert torch.equal(codec.decode(codec.encode(x.view(24, 128))).view(6, 4, 128), fp8_round_trip(x))
    assert (0, 128) == tuple(fp8_round_trip(x[:0, 0]).shape)


@pytest.mark.parametrize(("out", "size"), [(64, 96), (70, 100), (3, 32)])
def test_fp8_weights_come_back_within_half_a_step(out: int, size: int) -> None:
    """A block of 32 x 32 shares one power of two; blocks at the edges may be smaller."""
    weight = draw(out, size)
    stored, scale = quantise_fp8_weight(weight)
    read = dequantise_fp8_weight(stored, scale)

    assert ((out, size), (-(-out // 32), -(-size // 32))) == (tuple(stored.shape), tuple(scale.shape))
    assert (torch.float8_e4m3fn, torch.float8_e8m0fnu) == (stored.dtype, scale.dtype)
    assert ((read - weight).abs() <= weight.abs() / 16 + 2.0**-10 * weight.abs().max()).all()
    assert read[-1, -1] == stored[-1, -1].float() * scale[-1, -1].float()


def test_fp8_rows_and_fp4_weights_come_back() -> None:
    """Embedding rows have a scale per 32 of a row; fp4 weights too, and hold two values in a byte."""
    weight = draw(24, 128)
    rows, scale = quantise_fp8_rows(weight)
    assert (24, 4) == tuple(scale.shape)
    assert torch.equal(fp8_round_trip(weight), dequantise_fp8_rows(rows, scale))

    packed, scale = quantise_fp4_weight(weight)
    read = dequantise_fp4_weight(packed, scale)
    assert ((24, 64), (24, 4), torch.int8) == (tuple(packed.shape), tuple(scale.shape), packed.dtype)
    assert torch.equal(IndexFp4(128).decode(IndexFp4(128).encode(weight)), read)
    assert torch.equal(torch.sign(weight[read != 0]), torch.sign(read[read != 0]))


def test_the_three_numerics_round_where_they_say() -> None:
    """exact rounds nowhere, kvq in the cache records only, quant everywhere."""
    x = draw(5, 64)
    assert EXACT.bf16(x) is EXACT.fp8(x) is EXACT.index_query(x) is KVQ.bf16(x) is KVQ.fp8(x) is x
    assert torch.equal(x.bfloat16().float(), QUANT.bf16(x))
    assert torch.equal(fp8_round_trip(x), QUANT.fp8(x))
    assert torch.equal(IndexFp4(64).decode(IndexFp4(64).encode(x)), KVQ.index_query(x))
    assert torch.equal(QUANT.index_query(x), KVQ.index_query(x.view(5, 1, 64)).view(5, 64))

    for numerics in (EXACT, KVQ, QUANT):
        records = [codec(64) for codec in (numerics.window, numerics.main, numerics.index)]
        expected = [256, 256, 256] if numerics is EXACT else [66, 36, 34]
        assert expected == [codec.record_bytes for codec in records]
