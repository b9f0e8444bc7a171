"""No block is lost, given twice, freed while held, or found under a key whose bytes are gone."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernels.kv.pool import NULL_BLOCK, BlockPool, OutOfBlocks


def keys(path: str) -> list[bytes]:
    """Keys of a chain: each names its whole prefix, as real block keys do."""
    return [path[: end + 1].encode() for end in range(len(path))]


def hold(pool: BlockPool, path: str) -> list[int]:
    """Compute a prompt: reuse what is there, allocate and publish the rest."""
    chain = keys(path)
    table = pool.acquire(chain)
    for key in chain[len(table) :]:
        table += pool.allocate(1)
        pool.publish(table[-1], key)
    return table


def test_freed_blocks_stay_findable_until_reused() -> None:
    """A finished prompt can still be hit while nobody needed its room."""
    pool = BlockPool(num_blocks=5, block_tokens=16)
    table = hold(pool, "ab")
    pool.release(table)

    assert 2 == pool.match(keys("abc"))
    assert (4, 0, 2) == (pool.free_blocks, pool.used_blocks, pool.cached_blocks)
    assert table == pool.acquire(keys("abc"))


def test_the_null_block_is_never_given_out() -> None:
    """A pool of n has n - 1 to give."""
    pool = BlockPool(num_blocks=4, block_tokens=16)

    assert 3 == pool.total
    assert NULL_BLOCK not in pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 of 3 are free"):
        pool.allocate(1)


def test_a_refused_allocation_changes_nothing() -> None:
    """All or nothing: cached blocks are not evicted for a request that does not fit anyway."""
    pool = BlockPool(num_blocks=4, block_tokens=16)
    pool.release(hold(pool, "ab"))
    with pytest.raises(OutOfBlocks):
        pool.allocate(4)

    assert (2, 3, 0) == (pool.match(keys("ab")), pool.free_blocks, pool.num_evicted)


def test_blank_blocks_go_before_cached_ones_and_the_oldest_cached_first() -> None:
    """What was used last stays longest."""
    pool = BlockPool(num_blocks=5, block_tokens=16)
    for path in "xyx":
        pool.release(hold(pool, path))
    pool.allocate(2)
    assert (1, 1) == (pool.match(keys("x")), pool.match(keys("y")))
    pool.allocate(1)

    assert (1, 0) == (pool.match(keys("x")), pool.match(keys("y")))


def test_the_end_of_a_chain_is_evicted_before_its_start() -> None:
    """A block without its predecessors can never be hit, so the start is worth more."""
    pool = BlockPool(num_blocks=4, block_tokens=16)
    pool.release(hold(pool, "abc"))
    pool.allocate(1)

    assert 2 == pool.match(keys("abc"))


def test_the_first_to_publish_a_key_wins() -> None:
    """Two sequences that computed the same block can share one copy afterwards."""
    pool = BlockPool(num_blocks=4, block_tokens=16)
    first, second = pool.allocate(2)

    assert first == pool.publish(first, b"k")
    assert first == pool.publish(second, b"k")
    assert pool.key_of(second) is None
    pool.release([second])
    assert [first] == pool.acquire([b"k"])
    assert 2 == pool.holders(first)


@pytest.mark.parametrize("blocks", [[NULL_BLOCK], [1, 1], [3], [-1], [99]])
def test_releasing_what_is_not_held_is_an_error_and_releases_nothing(blocks) -> None:
    """A double free would give one block to two sequences."""
    pool = BlockPool(num_blocks=5, block_tokens=16)
    pool.allocate(2)
    with pytest.raises(ValueError, match="not held"):
        pool.release([2, *blocks])

    assert 2 == pool.used_blocks
    pool.check_integrity()


def test_a_block_is_named_once_and_only_by_a_holder() -> None:
    """A shared block never changes its meaning."""
    pool = BlockPool(num_blocks=3, block_tokens=16)
    (block,) = pool.allocate(1)
    pool.publish(block, b"one")
    assert block == pool.publish(block, b"one")
    with pytest.raises(ValueError, match="never renamed"):
        pool.publish(block, b"two")
    pool.release([block])
    with pytest.raises(ValueError, match="not held"):
        pool.publish(block, b"one")


def test_damage_is_found() -> None:
    """The integrity check sees a block that is in two states, and a key that leads astray."""
    pool = BlockPool(num_blocks=4, block_tokens=16)
    (block,) = pool.allocate(1)
    pool.publish(block, b"k")
    pool.check_integrity()
    pool._blank.append(block)
    with pytest.raises(RuntimeError, match=r"block 1 is in 2 states.*blank block 1 has a key"):
        pool.check_integrity()
    pool._blank.pop()
    pool._block_of[b"other"] = block
    with pytest.raises(RuntimeError, match="lead to each other"):
        pool.check_integrity()


PATHS = st.text(alphabet="ab", min_size=1, max_size=6)


class AnyHistory(RuleBasedStateMachine):
    """Random sequences of what engines do, against a record of what each block's bytes mean."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, block_tokens=16)
        self.tables: list[list[int]] = []
        self.meaning: dict[int, bytes] = {}  # block -> key its bytes were computed for

    def allocated(self, n: int) -> list[int]:
        held = {block for table in self.tables for block in table}
        blocks = self.pool.allocate(n)
        assert held.isdisjoint(blocks)
        assert NULL_BLOCK not in blocks
        assert n == len(set(blocks))
        for block in blocks:
            self.meaning.pop(block, None)  # the new owner overwrites it
        return blocks

    @rule(path=PATHS, swap=st.booleans())
    def compute(self, path: str, swap: bool) -> None:
        chain = keys(path)
        found = self.pool.match(chain)
        table = self.pool.acquire(chain)
        assert chain[:found] == [self.meaning[block] for block in table]
        self.tables.append(table)
        try:
            table += self.allocated(len(chain) - found)
        except OutOfBlocks:
            assert self.pool.free_blocks < len(chain) - found
            self.pool.release(self.tables.pop())
            return
        for i, key in enumerate(chain[found:], start=found):
            self.meaning[table[i]] = key
            first = self.pool.publish(table[i], key)
            assert key == self.meaning[first]
            if swap and first != table[i]:
                mine, (table[i],) = table[i], self.pool.acquire([key])
                self.pool.release([mine])

    @rule(n=st.integers(0, 4))
    def reserve(self, n: int) -> None:
        before = self.pool.free_blocks
        try:
            self.tables.append(self.allocated(n))
        except OutOfBlocks:
            assert n > before == self.pool.free_blocks

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        present = {key for key in map(self.pool.key_of, table) if key is not None}
        self.pool.release(table)
        assert all(self.pool.match([key]) for key in present)

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        self.pool.check_integrity()
        holders = Counter(block for table in self.tables for block in table)
        assert [holders[b] for b in range(self.pool.num_blocks)] == [
            self.pool.holders(b) for b in range(self.pool.num_blocks)
        ]
        assert self.pool.total == self.pool.used_blocks + self.pool.free_blocks
        assert len(holders) == self.pool.used_blocks


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
