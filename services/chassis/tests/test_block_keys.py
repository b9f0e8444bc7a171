"""Does every process name a block alike?"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis.block_keys import KeyChain, block_keys, key_root

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
