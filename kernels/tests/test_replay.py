"""What a prefix hit is worth, with and without a window state."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.batch import NO_REPLAY
from kernels.kv.replay import plan_hit, saved_positions
from kernels.kv.window import NULL_WINDOW, OutOfWindows, WindowPool, WindowSpec

REAL = WindowSpec(
    window_tokens=128, backtrack_tokens=6, num_layers=40, num_encoder_layers=20, state_bytes=3, encoder_bytes=1
)


@pytest.mark.parametrize(
    ("num_tokens", "matched", "has_state", "compute_from", "window_from"),
    [
        (50_000, 49_000, True, 48_896, 0),
        (50_000, 49_000, False, 48_768, 48_768),
        (50_000, 50_000, True, 49_792, 0),
        (300, 128, True, 128, 0),
        (300, 128, False, 0, 0),
        (261, 256, True, 0, 0),
        (134, 128, True, 0, 0),
        (100, 100, True, 0, 0),
        (1_048_576, 1_048_576, False, 1_048_192, 1_048_192),
    ],
)
def test_bounded_replay_starts_where_the_rules_say(num_tokens, matched, has_state, compute_from, window_from) -> None:
    """The table of the published rules; shared blocks up to the block hit are never written again."""
    states = range(0, num_tokens + 1, 128) if has_state else ()
    hit = plan_hit(num_tokens, matched, block_tokens=128, window=REAL, states=states, mode="mask")

    assert (compute_from, window_from) == (hit.compute_from, hit.replay.window_from)
    assert max(num_tokens - 134, 0) == hit.replay.keep_from
    assert hit.replay.write_from == hit.block_tokens


def test_without_a_state_the_exact_way_reaches_back_through_every_layer() -> None:
    """Off: 40 windows of 127 tokens before the hit are computed, or it is no hit."""
    hit = plan_hit(50_000, 49_000, block_tokens=128, window=REAL, states=(), mode="off")

    assert (48_896 - 40 * 127, 48_896, 48_896) == (hit.compute_from, hit.replay.write_from, hit.block_tokens)
    assert hit.compute_from == hit.replay.window_from
    assert NO_REPLAY == plan_hit(5_000, 4_000, block_tokens=128, window=REAL, states=()).replay


def test_an_older_state_is_used_while_it_is_cheaper() -> None:
    """The newest state below the hit wins, unless starting without one computes less."""
    near = plan_hit(50_000, 49_000, block_tokens=128, window=REAL, states={1_280, 44_800})
    far = plan_hit(50_000, 49_000, block_tokens=128, window=REAL, states={1_280})

    assert (44_800, 44_800, 0) == (near.state_position, near.compute_from, near.replay.window_from)
    assert (None, 48_896 - 40 * 127) == (far.state_position, far.compute_from)


def test_a_model_without_windows_hits_whole_blocks_and_computes_its_last_token() -> None:
    """Llama: nothing but blocks matters."""
    hit = plan_hit(256, 256, block_tokens=128, window=None, states=())

    assert (128, 128, None, NO_REPLAY) == (hit.block_tokens, hit.compute_from, hit.state_position, hit.replay)
    assert () == saved_positions(1000, block_tokens=128, window=None)


@given(st.integers(1, 2000), st.integers(0, 2000), st.sets(st.integers(0, 15)), st.sampled_from(["off", "mask"]))
@settings(max_examples=60)
def test_a_hit_never_reaches_what_is_not_there(num_tokens, matched, state_blocks, mode) -> None:
    """Every plan computes the last token, uses found blocks only, and names a state that exists."""
    spec = WindowSpec(16, 6, 12, 6, 3, 1)
    states = {block * 16 for block in state_blocks}
    hit = plan_hit(num_tokens, matched, block_tokens=16, window=spec, states=states, mode=mode)

    assert 0 <= hit.compute_from < num_tokens
    assert hit.compute_from <= hit.block_tokens <= min(matched, num_tokens)
    assert hit.state_position is None or hit.state_position == hit.compute_from in states
    assert hit.block_tokens == hit.replay.write_from
    if mode == "off" and hit.state_position is None and hit.compute_from:
        assert hit.block_tokens - hit.compute_from == spec.exact_tokens


def test_states_are_saved_where_the_next_prompts_start() -> None:
    """Once for the same beginning again, once for the next turn; never at 0."""
    assert (49_792, 49_920) == saved_positions(50_000, block_tokens=128, window=REAL)
    assert (128,) == saved_positions(200, block_tokens=128, window=REAL)
    assert () == saved_positions(100, block_tokens=128, window=REAL)


def test_window_slots_are_given_out_once() -> None:
    """A held slot is nobody else's; a model without windows never runs out."""
    pool = WindowPool(3)
    first, second = pool.allocate(), pool.allocate()

    assert {1, 2} == {first, second}
    with pytest.raises(OutOfWindows):
        pool.allocate()
    pool.release(first)
    assert (1, True) == (pool.used_windows, pool.has_free)
    with pytest.raises(ValueError, match="not held"):
        pool.release(first)
    assert NULL_WINDOW == WindowPool(0).allocate()
    with pytest.raises(ValueError, match="none to give out"):
        WindowPool(1)
