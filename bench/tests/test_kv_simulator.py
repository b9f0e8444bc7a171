"""Does the simulated store count what a store would have hit?"""

import math
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kv_simulator import TraceRequest, infinite_hit_rate, lru_hit_rate, read_mooncake, simulate
from bench.kv_traces import BLOCK_BYTES, NAMES, TRACES

CHAINS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=30)


def requests_of(chains: list[list[int]], *, gap_seconds: float = 1.0) -> list[TraceRequest]:
    """Give every distinct prefix an id of its own, as block keys do."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        TraceRequest(
            place * gap_seconds, [ids.setdefault(tuple(chain[: end + 1]), len(ids) + 1) for end in range(len(chain))]
        )
        for place, chain in enumerate(chains)
    ]


@settings(max_examples=30)
@given(CHAINS)
def test_an_endless_store_hits_what_an_endless_cache_hits(chains: list[list[int]]) -> None:
    """Without a cap and without an end of life nothing is ever lost."""
    requests = requests_of(chains)

    assert infinite_hit_rate(requests) == simulate(requests, block_bytes=1000).hit_rate


@settings(max_examples=30)
@given(CHAINS, st.integers(2, 12))
def test_a_small_store_stays_below_its_cap(chains: list[list[int]], num_blocks: int) -> None:
    """The simulated disk never holds more than the cap, and never hits more than an endless one."""
    requests = requests_of(chains)
    max_bytes = num_blocks * 2 * 8192
    outcome = simulate(requests, max_bytes=max_bytes, block_bytes=1000, segment_bytes=8192)

    assert outcome.peak_bytes <= max_bytes
    assert outcome.hit_rate <= infinite_hit_rate(requests)


def test_a_life_shorter_than_the_gap_hits_nothing() -> None:
    """What is expired is never served."""
    requests = requests_of([[1, 2, 3]] * 5, gap_seconds=100.0)

    assert 0 == simulate(requests, block_bytes=1000, life_seconds=50.0).hit
    assert 12 == simulate(requests, block_bytes=1000, life_seconds=500.0).hit


def test_an_lru_of_single_blocks_keeps_the_latest() -> None:
    """The yardstick drops what was not asked for longest."""
    assert 1 / 3 == lru_hit_rate(requests_of([[1], [2], [1]]), max_blocks=2)
    assert 0 == lru_hit_rate(requests_of([[1], [2], [1]]), max_blocks=1)


@pytest.mark.slow
def test_a_real_trace_hits_within_a_point_when_there_is_room() -> None:
    """Published traffic: room for its distinct blocks is enough for all but one point of an endless cache's hits."""
    path = TRACES / NAMES["synthetic"]
    if not path.exists():
        pytest.skip(f"{path.name} is not in {path.parent}")
    requests = list(islice(read_mooncake(path), 1500))
    total = BLOCK_BYTES * len({block for request in requests for block in request.blocks})
    best = infinite_hit_rate(requests)

    assert best - 0.01 <= simulate(requests, max_bytes=total / 0.9, block_bytes=BLOCK_BYTES).hit_rate <= best
    assert best == simulate(requests, max_bytes=math.inf, block_bytes=BLOCK_BYTES, life_seconds=3 * 86_400).hit_rate
