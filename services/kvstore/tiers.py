"""What do the local engine and the tier behind it (an object store) ask of each other?

The engine tells a listener of each sealed segment and each deletion, and asks a source for blocks that are not local.
All of it is optional: without a tier behind it the engine is whole. Every failure or delay on the other side is a miss.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.kvstore.index import BlockLocation
from services.kvstore.segments import Block


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment file that gets no more records. Its bytes are as services/kvstore/format.py says."""

    path: Path
    number: int
    epoch: int
    """64 random bits: with the number, a name that no other store or life gives again."""
    retention: int
    """RetentionClass number; one for the whole segment."""
    locations: Sequence[BlockLocation]
    """Every block in it, in the order of their offsets. `offset_bytes` is the record's header; the stored payload of
    `stored_bytes` follows it after format.HEADER_BYTES."""
    num_bytes: int
    """Length of the file, footer included."""
    last_created_unix_seconds: float
    expires_at_unix_seconds: float
    """When its last block's time is over; infinity for blocks that are kept until room is needed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What an operator wants removed. Fields that are not None must all match; all None is everything."""

    tenant: str | None = None
    fingerprint: bytes | None = None
    retention: int | None = None

    def matches(self, block: BlockLocation | Block) -> bool:
        return (
            (self.tenant is None or self.tenant == block.tenant)
            and (self.fingerprint is None or self.fingerprint == block.fingerprint)
            and (self.retention is None or self.retention == block.retention)
        )


@dataclass(frozen=True, slots=True)
class Removed:
    """What a deletion removed."""

    num_blocks: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RemoteLocation:
    """A block that the tier behind has."""

    location: BlockLocation
    """As the sealed segment's footer had it: key, fingerprint, tenant, sizes, CRC-32 of the stored bytes, flags."""
    epoch: int
    """Of the segment that it was written in; the nonce of encrypted blocks needs it."""
    place: object = None
    """Whatever `read` needs to find the bytes; the engine does not look at it."""


@dataclass(frozen=True, slots=True)
class RemoteBad:
    """A block behind whose bytes are not what was written."""

    key: bytes
    path: str
    """Of the object."""
    offset_bytes: int
    """In the object."""
    fault: str
    """ "remote" for other bytes, "missing" for none."""


@dataclass(frozen=True, slots=True)
class RemoteChecked:
    """How far a verification of the tier behind is."""

    num_blocks: int
    total_blocks: int
    num_bytes: int
    """Read since the report before."""
    bad: Sequence[RemoteBad] = ()
    """Found since the report before."""


class SegmentListener(Protocol):
    """Hears of segments and deletions. Called on the event loop: must return at once, and must not raise."""

    def sealed(self, segment: SealedSegment) -> None:
        """A segment was sealed, or was found sealed at start.

        The file may be unlinked at any later time: open it here (an open descriptor keeps the bytes) or take a miss.
        """

    async def evict(self, selection: Selection) -> Removed:
        """Remove what matches, for good; return what was removed once it is gone. May raise: the operator hears."""


class RemoteBlocks(Protocol):
    """Blocks of other replicas and other days. Bounded and deadlined by whoever implements it."""

    async def longest(self, fingerprint: bytes, keys: Sequence[bytes]) -> Sequence[RemoteLocation]:
        """Return where the leading keys are, stopping before the first that is not there or is expired."""

    async def read(self, location: RemoteLocation) -> bytes | memoryview:
        """Return the stored bytes (`stored_bytes` of them), checked against `crc32`; raise when they cannot be had."""

    async def bring(self, location: RemoteLocation) -> bool:
        """Put a block on the engine's disk too, and wait for that; False when it cannot be."""

    def verify(self, *, max_bytes: int) -> AsyncIterator[RemoteChecked]:
        """Read back what is there, at most so many bytes, and say what is bad. Raises NoReplica when it cannot be."""

    @property
    def breaker(self) -> str:
        """For the stats: "closed" (in use) or "open" (left alone after failures)."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found there, for the stats."""


class LocalEngine(Protocol):
    """What the tier behind asks of the engine, on the event loop."""

    async def seal_older_than(self, seconds: float) -> None:
        """Seal every open segment whose first block is older: what was not sealed is lost with this replica's disk."""

    def holders(self) -> Collection[str]:
        """Return the tenants whose blocks can be found here."""

    async def evict_local(self, selection: Selection, before_unix_seconds: float) -> Removed:
        """Remove what matches here, without telling the listener: another replica was asked, and has told the tier."""
