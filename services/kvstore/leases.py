"""Who keeps which blocks readable, and until when?

Leases keep segments for the moment between a lookup and its read; pins keep blocks for a session. Both end by
themselves, both are bounded, and both live in memory: a restart ends them. The clock comes in as a value: for leases a
steady one, for pins, whose end their owner is told, the one on the wall.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.kvstore.index import BlockLocation

DEFAULT_LEASE_SECONDS = 30.0
"""Also the most: a reader that takes longer computes faster than it reads."""
DEFAULT_PIN_SECONDS = 3600.0
MAX_PIN_SECONDS = 30 * 86_400.0

Name = tuple[bytes, bytes]
"""Fingerprint and key of a block."""


@dataclass(slots=True)
class _Lease:
    request_id: str
    segments: tuple[int, ...]
    expires_at: float


class LeaseTable:
    """Leases, from lookup to the end of the read. A segment that is held is not unlinked.

    A request id may come again at once, after a cancel: the first read's end must not take the second one's lease.
    """

    def __init__(self, max_leases: int = 4096) -> None:
        self._max_leases = max_leases
        self._leases: dict[int, _Lease] = {}
        self._unread: dict[str, int] = {}
        """Of each request id, the lease whose read has not begun."""
        self._last_lease = 0
        self._held: Counter[int] = Counter()
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def holds(self, segment: int) -> bool:
        return segment in self._held

    def grant(self, request_id: str, segments: Iterable[int], *, seconds: float, now: float) -> float:
        """Hold the segments for a request's read; return for how long (0: table full).

        Instead of what it held before, unless a read of that has begun: that one goes on with what it has.
        """
        self.end(self.claim(request_id))
        if len(self._leases) >= self._max_leases:
            self.expire(now)
            if len(self._leases) >= self._max_leases:
                return 0.0
        granted = min(seconds, DEFAULT_LEASE_SECONDS) if seconds > 0 else DEFAULT_LEASE_SECONDS
        lease = _Lease(request_id, tuple(segments), now + granted)
        self._last_lease += 1
        self._leases[self._last_lease] = lease
        self._unread[request_id] = self._last_lease
        self._held.update(lease.segments)
        return granted

    def claim(self, request_id: str) -> int:
        """Return the number of the request's lease, for the read that begins now to end it; 0 when it has none."""
        return self._unread.pop(request_id, 0)

    def end(self, number: int) -> None:
        """Let go of what a lease held; fine when it is over, or is 0."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        if self._unread.get(lease.request_id) == number:
            del self._unread[lease.request_id]
        for segment in lease.segments:
            self._held[segment] -= 1
            if self._held[segment] == 0:
                del self._held[segment]

    def expire(self, now: float) -> None:
        """Let go of the leases whose time is over."""
        for number in [number for number, lease in self._leases.items() if lease.expires_at <= now]:
            self.end(number)
            self.num_expired += 1


@dataclass(slots=True)
class _Session:
    expires_at: float
    blocks: dict[Name, int] = field(default_factory=dict)
    """Payload bytes by name."""


class PinTable:
    """Pins by tenant and session. A block may be pinned by several."""

    def __init__(self, max_sessions: int = 10_000) -> None:
        self._max_sessions = max_sessions
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._counts: Counter[Name] = Counter()
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def names(self) -> Iterable[Name]:
        """Every pinned block."""
        return self._counts.keys()

    def is_pinned(self, location: BlockLocation) -> bool:
        return (location.fingerprint, location.key) in self._counts

    def held_bytes(self, tenant: str | None = None) -> int:
        """Return what a tenant's sessions pin, or all sessions together."""
        return self._bytes.total() if tenant is None else self._bytes[tenant]

    def pin(
        self,
        tenant: str,
        session_id: str,
        blocks: Sequence[BlockLocation],
        *,
        seconds: float,
        now: float,
        room_bytes: int,
    ) -> tuple[int, float]:
        """Pin leading blocks as far as `room_bytes` more go; return how many are pinned, and until when.

        Blocks that the session has already cost nothing again; its time is set anew for all of them.
        """
        held = min(seconds, MAX_PIN_SECONDS) if seconds > 0 else DEFAULT_PIN_SECONDS
        session = self._sessions.get((tenant, session_id))
        if session is None:
            if len(self._sessions) >= self._max_sessions:
                return 0, 0.0
            session = self._sessions[tenant, session_id] = _Session(0.0)
        session.expires_at = now + held
        num_pinned = 0
        for location in blocks:
            name = (location.fingerprint, location.key)
            if name not in session.blocks:
                if location.block_bytes > room_bytes:
                    break
                room_bytes -= location.block_bytes
                session.blocks[name] = location.block_bytes
                self._counts[name] += 1
                self._bytes[tenant] += location.block_bytes
            num_pinned += 1
        if not session.blocks:
            del self._sessions[tenant, session_id]
        return num_pinned, session.expires_at

    def release(self, tenant: str, session_id: str, keys: Iterable[bytes] = ()) -> int:
        """Take back the pins of these keys, or of the whole session without any; return how many there were."""
        session = self._sessions.get((tenant, session_id))
        if session is None:
            return 0
        wanted = set(keys)
        names = [name for name in session.blocks if not wanted or name[1] in wanted]
        self._drop(tenant, session, names)
        if not session.blocks:
            del self._sessions[tenant, session_id]
        return len(names)

    def forget(self, names: Iterable[Name]) -> None:
        """Drop the pins of blocks that were deleted."""
        gone = set(names)
        for (tenant, session_id), session in list(self._sessions.items()):
            self._drop(tenant, session, [name for name in session.blocks if name in gone])
            if not session.blocks:
                del self._sessions[tenant, session_id]

    def expire(self, now: float) -> None:
        """Take back the pins of sessions whose time is over."""
        for tenant, session_id in [name for name, one in self._sessions.items() if one.expires_at <= now]:
            self.release(tenant, session_id)

    def ends_of(self) -> dict[Name, float]:
        """Return until when each block is pinned."""
        ends: dict[Name, float] = {}
        for session in self._sessions.values():
            for name in session.blocks:
                ends[name] = max(ends.get(name, 0.0), session.expires_at)
        return ends

    def _drop(self, tenant: str, session: _Session, names: Iterable[Name]) -> None:
        for name in names:
            self._bytes[tenant] -= session.blocks.pop(name)
            self._counts[name] -= 1
            if self._counts[name] == 0:
                del self._counts[name]
        if self._bytes[tenant] == 0:
            del self._bytes[tenant]
