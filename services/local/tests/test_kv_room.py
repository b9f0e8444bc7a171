"""Is a KV store refused that would silently keep nothing?"""

from pathlib import Path

import pytest

from services.kvstore.store import MAX_BLOCK_BYTES
from services.kvstore.tests.blocks import block, open_store
from services.local.kv_room import LONGEST_BYTES, block_bytes_of, check_room, least_bytes
from services.local.plan import Options
from services.prefill.tests.tiny_model import write_tiny_model

BLOCK_BYTES = 128 * 2 * 2 * 2 * 8 * 2
"""Of the tiny model in bf16: 128 tokens, 2 layers, K and V, 2 heads of 8 values."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


async def test_the_least_store_goes_on_storing(tmp_path: Path) -> None:
    """Blocks of every class, one after the other, long after it is full."""
    store = await open_store(tmp_path, max_bytes=least_bytes(20_000), segment_bytes=1 << 20)
    for number in range(12):
        await store.write(block(number, 20_000, retention=number % 3))

    assert {} == {reason: count for reason, count in store.counts.write_drops.items() if count}
    assert 0 < store.num_blocks < 12
    await store.close()


def test_no_store_takes_longer_blocks_than_are_thought_of() -> None:
    """Above that cap no model is opened, since no block can be too long."""
    assert MAX_BLOCK_BYTES == LONGEST_BYTES


@pytest.mark.slow
def test_a_model_s_blocks_are_measured_as_the_engines_lay_them_out(model: Path, tmp_path: Path) -> None:
    """A folder that no engine takes is not judged here."""
    assert BLOCK_BYTES == block_bytes_of(model, "bf16")
    assert 2 * BLOCK_BYTES == block_bytes_of(model, "fp32")
    (tmp_path / "config.json").write_text("{}")
    assert block_bytes_of(tmp_path, "bf16") is None
    assert block_bytes_of(tmp_path / "none", "bf16") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv_bytes": 100_000}, r"^--kv-bytes \(98 KiB\): at least 1M; .* takes 16 KiB, and a store needs room for 5"),
        ({"kv_bytes": 300_000, "num_kvstore": 3}, "at least 3M; .* each of 3 stores"),
        ({"settings": (("kvstore", "max_bytes", "99999"),)}, r"^--set kvstore.max_bytes=99999: at least 1048576; "),
        ({"kv_bytes": 150_000, "settings": (("prefill", "dtype", "fp32"),)}, "takes 32 KiB"),
    ],
)
def test_too_small_a_store_is_refused_with_the_least(model: Path, options, expected: str) -> None:
    """In the words that were typed."""
    with pytest.raises(ValueError, match=expected):
        check_room(Options(model=model, **options))


@pytest.mark.slow
def test_a_store_that_is_large_enough_passes(model: Path) -> None:
    """At the least, and where nobody need look at the model."""
    check_room(Options(model=model, kv_bytes=least_bytes(BLOCK_BYTES)))
    check_room(Options(model=Path("/none")))
