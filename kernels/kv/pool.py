"""Which block holds what, who holds it, and which one is given out next?

Block ids and reference counts only: no bytes live here. One engine thread owns a pool. A full block that is published
under its key stays findable after its last holder released it, until its room is needed.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0
"""Padding in block tables; never given out, so a stray write to it harms nobody."""


class OutOfBlocks(Exception):  # noqa: N818 - named by meaning, like the service errors
    """Fewer blocks are free than were asked for; nothing was given out."""


class BlockPool:
    """Block ids 1 .. num_blocks-1 of one device.

    Every block is in exactly one state: used (at least one holder), cached (no holder, found by its key) or blank (no
    holder, no key). `free_blocks` counts cached and blank ones: `allocate` can give out all of them.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        """num_blocks counts the null block, as the device arrays do."""
        if num_blocks < 2 or block_tokens < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_tokens} tokens has nothing to give out")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_evicted = 0
        """Cached blocks whose room was given to others, since the start."""
        self._holders = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # next to evict first
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def total(self) -> int:
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def used_blocks(self) -> int:
        return self.total - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are here, used or cached. Changes nothing."""
        for found, key in enumerate(keys):
            if key not in self._block_of:
                return found
        return len(keys)

    def acquire(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest leading run of keys that is here; its block ids, in order."""
        blocks = [self._block_of[key] for key in keys[: self.match(keys)]]
        for block in blocks:
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1
        return blocks

    def allocate(self, n: int) -> list[int]:
        """Hold n blocks without key, evicting the longest unused cached ones if needed; all n or OutOfBlocks."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.free_blocks:
            raise OutOfBlocks(f"{n} blocks asked for, {self.free_blocks} of {self.total} are free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(n)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def publish(self, block_id: int, key: bytes) -> int:
        """Name a full block that the caller holds. Returns the block that carries the key: the first one published.

        When that is another block, `block_id` stays unnamed; a caller who wants the shared one acquires [key] and
        releases its own.
        """
        self._check_held([block_id])
        mine = self._key_of[block_id]
        if mine is not None and mine != key:
            raise ValueError(f"block {block_id} already carries another key; a shared block is never renamed")
        first = self._block_of.setdefault(key, block_id)
        if first == block_id:
            self._key_of[block_id] = key
        return first

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks, given in chain order; those with a key stay findable until their room is needed.

        The end of a chain becomes evictable before its start, so what remains is still a prefix.
        """
        self._check_held(block_ids)
        for block in reversed(block_ids):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._key_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def holders(self, block_id: int) -> int:
        """How many times the block is held now."""
        return self._holders[block_id]

    def key_of(self, block_id: int) -> bytes | None:
        """The key the block is published under; None while it has none."""
        return self._key_of[block_id]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is in exactly one state and every key leads to its block. O(total)."""
        wrong = [
            f"block {block} is in {places} states"
            for block, places in self._states().items()
            if places != (0 if block == NULL_BLOCK else 1)
        ]
        wrong += [f"block {b} has {n} holders" for b, n in enumerate(self._holders) if n < 0]
        wrong += [f"cached block {block} has no key" for block in self._cached if self._key_of[block] is None]
        wrong += [f"blank block {block} has a key" for block in self._blank if self._key_of[block] is not None]
        named = {key: block for block, key in enumerate(self._key_of) if key is not None}
        if named != self._block_of or len(named) != sum(key is not None for key in self._key_of):
            wrong.append("keys and blocks do not lead to each other")
        if wrong:
            raise RuntimeError("block pool is inconsistent: " + "; ".join(wrong))

    def _states(self) -> dict[int, int]:
        places = Counter(self._blank)
        places.update(self._cached.keys())
        places.update(block for block, holders in enumerate(self._holders) if holders > 0)
        return {block: places[block] for block in range(self.num_blocks)}

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        assert key is not None, "only named blocks are cached"
        del self._block_of[key]
        self._key_of[block] = None
        self.num_evicted += 1
        return block

    def _check_held(self, block_ids: Sequence[int]) -> None:
        for block, times in Counter(block_ids).items():
            if not NULL_BLOCK < block < self.num_blocks or self._holders[block] < times:
                raise ValueError(f"block {block} is not held {times} time(s)")
