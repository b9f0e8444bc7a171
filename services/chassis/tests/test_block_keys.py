"""Does every process name a block alike?"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.common_pb2 import ImageRef
from services.chassis.block_keys import KeyChain, block_keys, image_extras, key_root

GOLDEN = Path(__file__).resolve().parents[3].parent / "shared" / "golden" / "block_keys.json"
ROOT = key_root(bytes(32), bytes(32), b"tenant")


@pytest.mark.skipif(not GOLDEN.exists(), reason=f"no golden vectors at {GOLDEN}")
def test_keys_equal_the_golden_vectors() -> None:
    """Root, chain, extras and block lengths give the published keys."""
    for case in json.loads(GOLDEN.read_text()):
        tokens = [(i * 7919 + case["case"] * 104729) % 49152 for i in range(case["num_tokens"])]
        root = key_root(*(bytes.fromhex(case[name]) for name in ("cluster_key", "fingerprint", "tenant_salt")))
        extra = {int(index): bytes.fromhex(value) for index, value in case["extra"].items()}

        keys = block_keys(root, tokens, block_tokens=case["block"], extra=extra)

        assert case["keys"] == [key.hex() for key in keys]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    block_tokens=st.integers(1, 16),
    extra=st.dictionaries(st.integers(0, 5), st.binary(max_size=8), max_size=3),
    cut=st.integers(0, 70),
)
def test_a_chain_that_grows_gives_the_same_keys(
    tokens: list[int], block_tokens: int, extra: dict[int, bytes], cut: int
) -> None:
    """Decode, token by token, and prefill, all at once, agree on every key."""
    chain = KeyChain(ROOT, block_tokens=block_tokens, extra=extra)
    appended = chain.extend(tokens[:cut])
    appended += tuple(key for token in tokens[cut:] if (key := chain.append(token)) is not None)

    expected = block_keys(ROOT, tokens, block_tokens=block_tokens, extra=extra)
    assert expected == appended == chain.keys
    assert len(tokens) == chain.num_tokens


def test_tenants_share_no_key() -> None:
    """The same prompt of two tenants has not one key in common."""
    other = key_root(bytes(32), bytes(32), b"other")
    tokens = range(64)

    shared = set(block_keys(ROOT, tokens, block_tokens=16)) & set(block_keys(other, tokens, block_tokens=16))

    assert set() == shared


def test_a_token_that_is_no_u32_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_keys(ROOT, [2**32], block_tokens=1)


def image(position: int, num_tokens: int, *, name: bytes = b"h", tower: bytes = b"v") -> ImageRef:
    return ImageRef(content_hash=name * 32, vision_fingerprint=tower * 32, position=position, num_tokens=num_tokens)


def test_a_block_s_extra_names_every_image_in_it() -> None:
    """Hash, vision model, and the image's beginning as seen from the block: written out byte by byte."""
    extras = image_extras([image(14, 20), image(40, 3, name=b"i")], block_tokens=16)

    first, second = b"h" * 32 + b"v" * 32, b"i" * 32 + b"v" * 32
    assert {
        0: first + b"\x0e\x00\x00\x00",
        1: first + b"\xfe\xff\xff\xff",
        2: first + b"\xee\xff\xff\xff" + second + b"\x08\x00\x00\x00",
    } == extras


@pytest.mark.parametrize(
    ("position", "num_tokens", "blocks"),
    [(0, 16, [0]), (15, 1, [0]), (16, 1, [1]), (15, 2, [0, 1]), (16, 33, [1, 2, 3])],
)
def test_only_blocks_with_a_part_of_the_image_are_named_by_it(
    position: int, num_tokens: int, blocks: list[int]
) -> None:
    """An image that ends with a block leaves the next one alone."""
    assert blocks == sorted(image_extras([image(position, num_tokens)], block_tokens=16))


def test_text_has_no_extras() -> None:
    """Keys of text are those of a model that takes no images."""
    assert {} == image_extras([], block_tokens=16)


def test_another_image_place_or_tower_is_another_block() -> None:
    """The token ids are the same in all four: only the extras tell them apart."""
    tokens = [5] * 32
    images = (image(3, 10), image(3, 10, name=b"x"), image(3, 10, tower=b"x"), image(4, 10))
    keys = {
        block_keys(ROOT, tokens, block_tokens=16, extra=image_extras([each], block_tokens=16))[0] for each in images
    }
    assert 4 == len(keys)
