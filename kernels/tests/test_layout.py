"""A layout is the same bytes in every process, or its digest differs."""

import dataclasses

import pytest

from kernels.kv.layout import ALIGN_BYTES, KvLayout, place


def smol(block_tokens: int = 128, dtype: str = "bf16") -> KvLayout:
    return KvLayout.dense(num_layers=30, block_tokens=block_tokens, num_kv_heads=3, head_dim=64, dtype=dtype)


def test_a_dense_block_holds_k_then_v_of_every_layer_without_gaps() -> None:
    """Its size is the arithmetic everyone expects, and Llama has no window."""
    layout = smol()

    assert 30 * 2 * 128 * 3 * 64 * 2 == layout.block_bytes
    assert 0 == layout.window_bytes
    assert [(0, "k"), (0, "v"), (1, "k")] == [(s.layer, s.name) for s in layout.streams[:3]]
    assert layout.stream(0, "k").end == layout.stream(0, "v").offset
    with pytest.raises(KeyError, match="layer 30"):
        layout.stream(30, "k")


def test_v41_fits_the_same_description() -> None:
    """Compressed streams, fewer entries than tokens, and window state are described without new fields."""
    sections = [
        (layer, name, (entries, record), "uint8")
        for layer, entries in ((2, 64), (8, 64), (14, 64), (20, 128))
        for name, record in (("index", 68), ("main", 288))
    ]
    window = place((layer, "window", (134, 528), "uint8") for layer in range(20))
    layout = KvLayout(128, place(sections), window)

    assert 113_920 == layout.block_bytes
    assert 1_415_040 == layout.window_bytes


def test_streams_start_on_their_boundary() -> None:
    """An odd-sized stream pushes the next one to the boundary, and the block ends on one."""
    layout = KvLayout(1, place([(0, "a", (5,), "uint8"), (0, "b", (3,), "uint8")]))

    assert [0, ALIGN_BYTES] == [stream.offset for stream in layout.streams]
    assert 2 * ALIGN_BYTES == layout.block_bytes


def test_the_digest_is_known_and_changes_with_every_part() -> None:
    """Pinned, because blocks on disk are found by it after an upgrade."""
    layout = smol()

    assert "5070402b37b5c8c3c8b09901e680975b4a4f5a57f0b97454b9bcc3c9ffe620d9" == layout.digest().hex()
    others = [
        smol(block_tokens=16),
        smol(dtype="fp32"),
        smol(dtype="fp16"),
        KvLayout.dense(num_layers=29, block_tokens=128, num_kv_heads=3, head_dim=64, dtype="bf16"),
        KvLayout.dense(num_layers=30, block_tokens=128, num_kv_heads=64, head_dim=3, dtype="bf16"),
        dataclasses.replace(layout, window_streams=place([(0, "window", (1, 1), "uint8")])),
    ]
    assert len(others) + 1 == len({layout.digest(), *(other.digest() for other in others)})


@pytest.mark.parametrize(
    ("streams", "reason"),
    [
        ((), "at least one stream"),
        (place([(0, "k", (1,), "fp32"), (0, "k", (1,), "fp32")]), "twice"),
        (tuple(reversed(place([(0, "k", (8,), "fp32"), (0, "v", (8,), "fp32")]))), "overlaps"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(streams, reason) -> None:
    """Overlaps, duplicates and empty blocks are found when the layout is made."""
    with pytest.raises(ValueError, match=reason):
        KvLayout(128, streams)


def test_an_unknown_dtype_is_refused() -> None:
    """The message lists the known ones."""
    with pytest.raises(ValueError, match=r"fp64.*bf16"):
        place([(0, "k", (1,), "fp64")])
