"""Which blocks does the object store have, and where?

Pure and in memory, rebuilt from manifests by every replica. A block costs an entry of a dictionary and its packed entry
in the manifest; no object is made before it is asked for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.kvstore.manifests import Entry, Manifest, ManifestName

_POSITION_BITS = 20
_POSITIONS = (1 << _POSITION_BITS) - 1


class Found(NamedTuple):
    """A block in the object store."""

    name: ManifestName
    manifest: Manifest
    entry: Entry

    @property
    def expires_unix_seconds(self) -> float:
        return self.entry.created_unix_seconds + self.manifest.life_seconds


@dataclass(frozen=True, slots=True)
class _Listed:
    name: ManifestName
    manifest: Manifest


class RemoteIndex:
    """Finds blocks of published manifests by fingerprint and key; of two copies the one that lives longer.

    Of two that live equally long it is the later one: an object that is rewritten is published before the old one goes.
    """

    def __init__(self, max_blocks: int) -> None:
        """max_blocks: beyond it the manifests that expire first are forgotten; their blocks stay where they are."""
        self._max_blocks = max_blocks
        self._blocks: dict[bytes, dict[bytes, int]] = {}
        """fingerprint -> key -> manifest's number and position in it, as one integer."""
        self._listed: dict[int, _Listed] = {}
        self._numbers: dict[ManifestName, int] = {}
        self._overlaps: dict[int, set[int]] = {}
        """Manifests that list the same block: when one goes, the block is found in the other."""
        self._forgotten: dict[ManifestName, float] = {}
        """Expiry by name, so that the next listing does not bring them back."""
        self._next_number = 0
        self.num_blocks = 0

    def __contains__(self, name: ManifestName) -> bool:
        return name in self._numbers or name in self._forgotten

    def names(self) -> tuple[ManifestName, ...]:
        """Return what is known to be published, forgotten ones included."""
        return *self._numbers, *self._forgotten

    def forgotten(self) -> tuple[ManifestName, ...]:
        """Return the published manifests whose blocks are not found here for want of room."""
        return tuple(self._forgotten)

    def manifests(self) -> Iterator[tuple[ManifestName, Manifest]]:
        for one in tuple(self._listed.values()):
            yield one.name, one.manifest

    def add(self, name: ManifestName, manifest: Manifest) -> None:
        """Make a manifest's blocks findable; what was known under its name is replaced."""
        self.remove(name)
        number, self._next_number = self._next_number, self._next_number + 1
        self._listed[number] = _Listed(name, manifest)
        self._numbers[name] = number
        self._claim(number)
        while self.num_blocks > self._max_blocks and len(self._listed) > 1:
            self._forget_first()

    def remove(self, name: ManifestName) -> None:
        """Forget a manifest and the blocks that were found through it."""
        self._forgotten.pop(name, None)
        number = self._numbers.pop(name, None)
        if number is None:
            return
        for position, (key, fingerprint, _) in enumerate(self._listed[number].manifest.heads()):
            self._drop(fingerprint, key, number << _POSITION_BITS | position)
        del self._listed[number]
        overlapping = self._overlaps.pop(number, set())
        for other in overlapping:
            self._overlaps[other].discard(number)
        for other in overlapping:
            self._claim(other)

    def remove_block(self, found: Found) -> None:
        """Forget one block, for its bytes turned out to be wrong or gone."""
        place = self._blocks.get(found.entry.fingerprint, {}).get(found.entry.key)
        if place is not None and self._found(place).name == found.name:
            self._drop(found.entry.fingerprint, found.entry.key, place)

    def find(self, fingerprint: bytes, key: bytes, now: float) -> Found | None:
        """Return where a block is; None when it is not there or its time is over. now: seconds since the Unix epoch."""
        place = self._blocks.get(fingerprint, {}).get(key)
        if place is None:
            return None
        found = self._found(place)
        return found if now < found.expires_unix_seconds else None

    def longest(self, fingerprint: bytes, keys: Iterable[bytes], now: float) -> Sequence[Found]:
        """Return where the leading keys are, stopping before the first that is not there."""
        prefix: list[Found] = []
        for key in keys:
            found = self.find(fingerprint, key, now)
            if found is None:
                break
            prefix.append(found)
        return prefix

    def expired(self, now: float) -> tuple[ManifestName, ...]:
        """Return the manifests none of whose blocks lives any more."""
        listed = [one.name for one in self._listed.values() if one.manifest.expires_unix_seconds <= now]
        return *listed, *(name for name, expires in self._forgotten.items() if expires <= now)

    def _found(self, place: int) -> Found:
        listed = self._listed[place >> _POSITION_BITS]
        return Found(listed.name, listed.manifest, listed.manifest.entries[place & _POSITIONS])

    def _drop(self, fingerprint: bytes, key: bytes, place: int) -> None:
        blocks = self._blocks.get(fingerprint, {})
        if blocks.get(key) == place:
            del blocks[key]
            self.num_blocks -= 1
            if not blocks:
                del self._blocks[fingerprint]

    def _claim(self, number: int) -> None:
        """Let a manifest's blocks be found, in it or in another one that has them and lives longer."""
        manifest = self._listed[number].manifest
        life_seconds = manifest.life_seconds
        for position, (key, fingerprint, created) in enumerate(manifest.heads()):
            blocks = self._blocks.setdefault(fingerprint, {})
            other = blocks.get(key)
            if other is None:
                self.num_blocks += 1
            elif other >> _POSITION_BITS != number:
                self._overlaps.setdefault(number, set()).add(other >> _POSITION_BITS)
                self._overlaps.setdefault(other >> _POSITION_BITS, set()).add(number)
                if self._found(other).expires_unix_seconds > created + life_seconds:
                    continue
            blocks[key] = number << _POSITION_BITS | position

    def _forget_first(self) -> None:
        first = min(self._listed.values(), key=lambda one: (one.manifest.expires_unix_seconds, one.name.id))
        self.remove(first.name)
        self._forgotten[first.name] = first.manifest.expires_unix_seconds
