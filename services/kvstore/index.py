"""Where does each stored block lie, and how long is the stored prefix of a chain of keys?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """One record: whose KV it is and where its bytes are."""

    key: bytes
    """Block key, 32 bytes."""
    fingerprint: bytes
    """Model fingerprint it was written under, 32 bytes."""
    segment: int
    """Number of the segment file."""
    offset_bytes: int
    """Start of the record's header in that file."""
    block_bytes: int
    """Payload length."""
    crc32: int
    """CRC-32 of the payload."""
    retention: int = 0
    """RetentionClass number, as the writer gave it."""


class BlockIndex:
    """Finds blocks by fingerprint and key. A key stays where it was first added until it is removed.

    Blocks of one fingerprint are invisible to every other, so a model change can never hit old KV.
    """

    def __init__(self) -> None:
        self._by_fingerprint: dict[bytes, dict[bytes, BlockLocation]] = {}
        self._by_segment: dict[int, list[BlockLocation]] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def add(self, location: BlockLocation) -> bool:
        """Make a block findable; False and no change when its key already is (first writer wins)."""
        blocks = self._by_fingerprint.setdefault(location.fingerprint, {})
        if location.key in blocks:
            return False
        blocks[location.key] = location
        self._by_segment.setdefault(location.segment, []).append(location)
        self._num_blocks += 1
        return True

    def find(self, fingerprint: bytes, key: bytes) -> BlockLocation | None:
        blocks = self._by_fingerprint.get(fingerprint)
        return blocks.get(key) if blocks else None

    def longest_prefix(self, fingerprint: bytes, keys: Iterable[bytes]) -> Sequence[BlockLocation]:
        """Return the locations of the leading keys that are stored, stopping before the first that is not."""
        blocks = self._by_fingerprint.get(fingerprint)
        found: list[BlockLocation] = []
        if not blocks:
            return found
        for key in keys:
            location = blocks.get(key)
            if location is None:
                break
            found.append(location)
        return found

    def remove(self, location: BlockLocation) -> bool:
        """Forget one block; False when its key is unknown or lies elsewhere by now."""
        blocks = self._by_fingerprint.get(location.fingerprint, {})
        if blocks.get(location.key) != location:
            return False
        self._forget(blocks, location)
        # The segment's list keeps the entry: remove_segment() skips what is no longer current, and damage is rare.
        return True

    def remove_segment(self, segment: int) -> int:
        """Forget every block that lies in a segment; return how many there were."""
        before = self._num_blocks
        for location in self._by_segment.pop(segment, []):
            blocks = self._by_fingerprint.get(location.fingerprint, {})
            if blocks.get(location.key) is location:
                self._forget(blocks, location)
        return before - self._num_blocks

    def _forget(self, blocks: dict[bytes, BlockLocation], location: BlockLocation) -> None:
        del blocks[location.key]
        if not blocks:
            del self._by_fingerprint[location.fingerprint]
        self._num_blocks -= 1
