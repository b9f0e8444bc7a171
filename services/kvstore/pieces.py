"""How do other replicas find blocks whose segment is not full yet?

Every two seconds the new blocks of open segments are uploaded as pieces: objects like those of sealed segments, only
smaller. When a segment itself is uploaded its small pieces go, so that a quiet store does not leave thousands of them;
large ones stay, and the segment's object is uploaded without what they hold. So a busy store uploads every block once,
and a quiet one twice. This keeps the books; uploads.py moves the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.kvstore.index import BlockLocation
from services.kvstore.manifests import ManifestName
from services.kvstore.tiers import SealedSegment

LARGE_BYTES = 16 << 20
"""A piece of this size is an object of a good size: it stays."""
MAX_PIECE_BYTES = 64 << 20
SUPERSEDED_SECONDS = 30.0
"""How long a small piece stays after its segment is there: by then others have heard of that one."""


@dataclass(slots=True)
class _Open:
    """What was uploaded of one open segment."""

    start_bytes: int = 0
    """Records before that are in pieces."""
    num_pieces: int = 0
    small: set[ManifestName] = field(default_factory=set)


class Pieces:
    """Which pieces of which segments are there, and which of them nobody needs any more. Pure; times come as values."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], _Open] = {}
        """By number and epoch of the segment."""
        self._superseded: list[tuple[float, ManifestName]] = []

    def next_blocks(self, segment: SealedSegment) -> tuple[int, Sequence[BlockLocation]]:
        """Return the number of a segment's next piece, and the blocks for it: none when all are in pieces already."""
        known = self._open.setdefault(_key(segment), _Open())
        blocks: list[BlockLocation] = []
        size = 0
        for one in segment.locations:
            if one.offset_bytes >= known.start_bytes:
                size += one.stored_bytes
                if blocks and size > MAX_PIECE_BYTES:
                    break
                blocks.append(one)
        return known.num_pieces, blocks

    def begin(self, segment: SealedSegment, name: ManifestName, blocks: Sequence[BlockLocation]) -> None:
        """Note a piece whose upload begins: from here on the whole segment's upload replaces it if it is small."""
        if sum(one.stored_bytes for one in blocks) < LARGE_BYTES:
            self._open.setdefault(_key(segment), _Open()).small.add(name)

    def done(self, segment: SealedSegment, blocks: Sequence[BlockLocation]) -> None:
        """Note that these blocks were uploaded."""
        known = self._open.get(_key(segment))
        if known is not None:  # else the whole segment was uploaded meanwhile
            known.num_pieces += 1
            known.start_bytes = blocks[-1].offset_bytes + 1

    def small(self, segment: SealedSegment) -> frozenset[ManifestName]:
        """Return the pieces that go when the whole segment is uploaded: what they hold must be in it."""
        known = self._open.get(_key(segment))
        return frozenset(known.small) if known is not None else frozenset()

    def whole_is_there(self, segment: SealedSegment, now: float) -> None:
        """Note that a segment was uploaded: its small pieces are superseded."""
        known = self._open.pop(_key(segment), None)
        self._superseded += [(now + SUPERSEDED_SECONDS, name) for name in (known.small if known is not None else ())]

    def stay(self, segment: SealedSegment) -> None:
        """Note that a segment will not be uploaded as a whole: its pieces are all that there is of it."""
        self._open.pop(_key(segment), None)

    def first_superseded(self, now: float) -> ManifestName | None:
        """Return a piece that is to be deleted by now."""
        return self._superseded[0][1] if self._superseded and self._superseded[0][0] <= now else None

    def deleted(self, name: ManifestName) -> None:
        """Note that a superseded piece is gone."""
        self._superseded = [one for one in self._superseded if one[1] != name]


def _key(segment: SealedSegment) -> tuple[int, int]:
    return segment.number, segment.epoch
