"""N-gram memory: the golden tables, windows, rows and gates, and who shares a compressed id."""

import functools
import json

import pytest
import torch

from kernels.models.config import ModelNotSupported
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.models.v41.engram import Engram, read_compressed_ids, tables_of
from kernels.ops.engram import compress, compress_vocabulary, hash_tables, table_rows
from kernels.ops.hyper import coefficients, mean_square, update
from kernels.ops.linear import GEMM_FP32, Linear
from kernels.ops.numerics import EXACT, QUANT, Numerics
from kernels.ops.row_tiles import TiledLinear, prove
from kernels.tests.golden_files import golden, tiny_v41

CPU = torch.device("cpu")


@functools.cache
def tiny_config() -> V41Config:
    return read_v41_config(tiny_v41())


@functools.cache
def compressed_ids() -> torch.Tensor:
    return read_compressed_ids(tiny_v41(), tiny_config().engram)


def windows(ids: torch.Tensor) -> torch.Tensor:
    """The last four compressed ids at each token of a text."""
    raw = torch.nn.functional.pad(ids.long(), (3, 0), value=-1).unfold(0, 4, 1).flip(1)
    return compress(raw, compressed_ids(), pad_token_id=2)


def spelled(text: str) -> str:
    """A text as a byte-level tokenizer file spells it."""
    printable = set(range(33, 127)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in text.encode())


def test_the_tiny_tables_are_the_golden_ones() -> None:
    """Sizes, offsets and multipliers of every layer, and the compressed vocabulary of its tokenizer."""
    assert torch.equal(golden("engram.old2new").long(), compressed_ids())
    for layer, tables in tables_of(tiny_config().engram).items():
        assert golden(f"engram.{layer}.primes").tolist() == [list(each) for each in tables.primes]
        assert golden(f"engram.{layer}.offsets").tolist() == list(tables.offsets)
        assert golden(f"engram.{layer}.mult").tolist() == list(tables.multipliers)


def test_the_real_tables_have_the_published_sizes() -> None:
    """Two layers, 24 parts each, all of different prime size."""
    tables = hash_tables([1, 14], vocab_size=16_000_000, heads=8, max_ngram=4, compressed_vocab_size=99092)

    assert [384_006_168, 384_016_682] == [each.num_rows for each in tables.values()]
    primes = [prime for each in tables.values() for sizes in each.primes for prime in sizes]
    assert 48 == len(set(primes))
    assert 16_000_000 <= min(primes)


def test_a_size_that_is_prime_itself_is_the_first() -> None:
    """The search starts at the vocabulary's own size, and no prime is taken twice."""
    tables = hash_tables([3, 7], vocab_size=103, heads=2, max_ngram=3, compressed_vocab_size=50)
    assert [((103, 107), (109, 113)), ((127, 131), (137, 139))] == [each.primes for each in tables.values()]


def test_windows_and_rows_are_the_golden_ones() -> None:
    """Over a plain text and one with an image in it, which cuts the n-grams."""
    mixed = windows(golden("engram.mixed.ids"))
    assert torch.equal(golden("engram.mixed.grams").long(), mixed)
    plain = windows(golden("seq.n48.ids"))
    assert torch.equal(golden("engram.grams.n48").long(), plain)

    tables = tables_of(tiny_config().engram)
    assert torch.equal(golden("engram.mixed.rows.1").long(), table_rows(mixed, tables[1]))
    for layer in (1, 4):
        assert torch.equal(golden(f"n48.exact.layers.{layer}.engram.rows").long(), table_rows(plain, tables[layer]))


def test_a_window_is_the_same_from_any_chunk() -> None:
    """With the three ids before it a token's window does not depend on where its chunk began."""
    ids = golden("engram.mixed.ids").long()
    whole = windows(ids)
    for start in range(3, len(ids)):
        assert torch.equal(whole[start:], windows(ids[start - 3 :])[3:])


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        (" the", "The", True),
        ("café", "CAFE", True),
        ("\ufb01n", "fin", True),
        ("a \t\r\n b", "a b", True),
        ("\n\n", " ", True),
        ("\u2003", " ", True),
        ("\x0b", " ", False),
        ("\x1ca", "a", False),
        ("\u0301", "", False),
        ("ΟΔΟΣ", "οδοσ", True),
        ("ΟΔΟΣ", "οδος", False),
    ],
)
def test_tokens_that_read_alike_share_an_id(left: str, right: str, shared: bool) -> None:
    """Accents, case and surplus space do not count; a token that nothing is left of reads as it is."""
    first, second = compress_vocabulary([spelled(left), spelled(right)]).tolist()
    assert shared == (first == second)


def test_a_piece_of_a_character_keeps_its_spelling() -> None:
    """Tokens that are no text by themselves stay apart, and a special token is spelled as it is."""
    pieces = [spelled("é")[:1], spelled("é")[1:], "<｜x｜>", "<|X|>", ""]
    assert [0, 1, 2, 2, 3] == compress_vocabulary(pieces).tolist()


def test_another_tokenizer_is_refused(tmp_path) -> None:
    """A vocabulary that the tables do not belong to, or none, says so at the start."""
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelNotSupported, match="does not exist"):
        read_compressed_ids(tmp_path, tiny_config().engram)
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "A": 1}}}))
    with pytest.raises(ModelNotSupported, match="read in 1 different ways"):
        read_compressed_ids(tmp_path, tiny_config().engram)
    path.write_text(json.dumps({"model": {"vocab": []}}))
    with pytest.raises(ModelNotSupported, match="no vocabulary"):
        read_compressed_ids(tmp_path, tiny_config().engram)


@functools.cache
def memory(layer: int, numerics: Numerics) -> Engram:
    checkpoint = Checkpoint(tiny_v41(), tiny_config())
    prefix = f"layers.{layer}.engram."
    wkv = Linear(GEMM_FP32, checkpoint.dense(f"{prefix}wkv.weight"))
    _, (tiles,) = prove(GEMM_FP32, [wkv], limit=64, device=CPU)
    return Engram(
        numerics,
        tables=tables_of(tiny_config().engram)[layer],
        gather=lambda rows: checkpoint.engram_rows(layer, rows),
        wkv=TiledLinear(wkv, tiles),
        query_weight=checkpoint.dense(f"{prefix}q_weight"),
        key_weight=checkpoint.dense(f"{prefix}k_weight"),
        eps=tiny_config().norm_eps,
    )


def streams_before(layer: int, numerics: Numerics) -> torch.Tensor:
    """The streams that enter a layer, from the golden values of the layer before it."""
    prefix, checkpoint = f"n48.{numerics.name}.layers.{layer - 1}", Checkpoint(tiny_v41(), tiny_config())
    streams = golden(f"{prefix}.stream_mid")
    parts = {part: checkpoint.dense(f"layers.{layer - 1}.hc_ffn_{part}") for part in ("fn", "base", "scale")}
    made = coefficients(
        streams.flatten(1) @ parts["fn"].T,
        mean_square(streams),
        scale=parts["scale"],
        base=parts["base"],
        eps=tiny_config().norm_eps,
        hc_eps=1e-6,
        iterations=20,
    )
    return numerics.bf16(update(streams, golden(f"{prefix}.ffn_out"), made))


@pytest.mark.parametrize(("numerics", "tolerance"), [(EXACT, 1e-4), (QUANT, 0.01)])
def test_streams_take_the_golden_memory(numerics: Numerics, tolerance: float) -> None:
    """The gates and streams after the first n-gram layer: exact by the largest difference, quant by relative L2."""
    engram, streams, grams = memory(1, numerics), streams_before(1, numerics), windows(golden("seq.n48.ids"))
    values = {
        "engram.gate": engram.gates(streams, grams),
        "stream_in": engram(streams, grams, None),
    }
    for name, got in values.items():
        expected = golden(f"n48.{numerics.name}.layers.1.{name}")
        difference = (got - expected).abs().max() if numerics is EXACT else (got - expected).norm() / expected.norm()
        assert difference <= tolerance, name
    assert (values["stream_in"] - streams).norm() > 0.01 * streams.norm()


@pytest.mark.parametrize("numerics", [EXACT, QUANT])
def test_memory_is_the_same_in_any_company(numerics: Numerics) -> None:
    """A token's streams have the same bits alone and in a crowd; images and padding stay as they were."""
    engram = memory(1, numerics)
    generator = torch.Generator().manual_seed(5)
    streams = torch.randn(61, 4, 128, generator=generator)
    grams = torch.randint(0, 258, (57, 4), generator=generator)
    images = torch.rand(57, generator=generator) < 0.3
    whole = engram(streams, grams, images)

    assert torch.equal(streams[57:], whole[57:])
    assert torch.equal(streams[:57][images], whole[:57][images])
    for start, end in ((0, 1), (7, 8), (3, 20), (56, 57), (0, 57)):
        part = engram(streams[start:end].clone(), grams[start:end], images[start:end])
        assert torch.equal(whole[start:end], part)
