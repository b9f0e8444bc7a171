"""What is one reservation, which one may be made, and which ticket names it?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING

from proto.common_pb2 import Ticket
from proto.decode_pb2 import CommitRequest, ReserveRequest
from services.chassis.errors import BlocksLost, DeadlinePassed, FathomError, InvalidRequest, PromptTooLong
from services.chassis.handoff import Staging, close_soon
from services.chassis.telemetry import log

if TYPE_CHECKING:
    from services.chassis.handoff_push import Piece
    from services.decode.admission import Limits
    from services.decode.landing import Landing
    from services.decode.lanes import Lane


class State(Enum):
    """How far a handoff has come."""

    OPEN = "open"
    COMMITTING = "committing"
    LANDED = "landed"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for one sequence's KV, from its ticket to the start of the sequence."""

    ticket: Ticket
    kv_tokens: int
    num_blocks: int
    present_blocks: int
    staging: Staging | None
    """None when nothing has to travel."""
    landing: Landing | None
    """As staging."""
    lane: Lane | None = None
    """The connection that bytes come on, or news of them."""
    is_pushed: bool = False
    """Bytes come by a `Push` right now."""
    state: State = State.OPEN
    expiry: asyncio.TimerHandle | None = None
    pushed_bytes: int = 0
    staged: dict[int | None, int] = field(default_factory=dict)
    """Bytes that came without a gap, of blocks larger than a piece, and with None of the window state."""
    ended: asyncio.Future[FathomError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done once it has committed (None) or was given back (why)."""

    @property
    def missing_blocks(self) -> int:
        return self.num_blocks - self.present_blocks

    def is_named_by(self, ticket: Ticket) -> bool:
        """Say whether a ticket is this reservation's: of this boot, with the same 16 random bytes."""
        return self.ticket.boot_id == ticket.boot_id and compare_digest(self.ticket.nonce, ticket.nonce)

    def check_alone(self) -> None:
        """Raise BlocksLost while bytes come already: what lands is counted by one writer."""
        if self.is_pushed:
            raise BlocksLost("a push brings this reservation's bytes already")
        if self.lane is not None and not self.lane.ended.done():
            raise BlocksLost("a lane brings this reservation's bytes already")

    async def take(self, piece: Piece) -> None:
        """Have the engine copy a whole block, or the window state, from the message or from its parts put together.

        Raises InvalidRequest for one that lies outside, and as `Landing.take`.
        """
        landing, staging = self.landing, self.staging
        assert landing is not None, "whoever asks for pieces has seen that something has to travel"
        assert staging is not None, "whoever asks for pieces has seen that something has to travel"
        offset, data = piece.head.offset_bytes, piece.data
        place = None if piece.head.is_window else piece.head.block_index - self.present_blocks
        size = landing.window_bytes if place is None else landing.block_bytes
        self.pushed_bytes += len(data)
        if len(data) == size and not offset:
            await landing.take(place, data)
            return
        staged = self.staged.get(place, 0)
        if staged == size:
            raise InvalidRequest("a part of a block came twice")
        if place is None:
            staging.write_window(offset, data)
        else:
            staging.write(place, offset, data)
        if offset == staged:
            self.staged[place] = offset + len(data)
            if self.staged[place] == size:
                await landing.take(place, staging.window() if place is None else staging.block(place))

    def end(self, error: FathomError | None) -> None:
        """Tell the holder, once."""
        if not self.ended.done():
            self.ended.set_result(error)

    def disarm(self) -> None:
        """Let it expire no more."""
        if self.expiry is not None:
            self.expiry.cancel()

    @property
    def backend(self) -> str:
        """How the bytes came: "shm", "tcp" or "grpc"."""
        if self.pushed_bytes:
            return "grpc"
        return "shm" if self.lane is None or self.lane.shares_file else "tcp"

    def close(self) -> None:
        """Give the staging area up, and receive no more."""
        if self.lane is not None:
            self.lane.close()
        if self.staging is not None:
            self.staging.remove()
            close_soon(self.staging.close)
            self.staging = None


async def open_staging(nonce: bytes, num_blocks: int, limits: Limits, folder: Path | None) -> Staging | None:
    """Make a staging area: in shared memory if there is any left, else in plain memory. None when nothing travels."""
    if num_blocks == 0 and limits.window_bytes == 0:
        return None
    # In a thread: claiming many megabytes of pages takes a while. If the caller goes away, the area goes as well.
    making = asyncio.ensure_future(asyncio.to_thread(_make_staging, nonce, num_blocks, limits, folder))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda made: made.result().close())
        raise


def _make_staging(nonce: bytes, num_blocks: int, limits: Limits, folder: Path | None) -> Staging:
    make = partial(
        Staging,
        nonce=nonce,
        num_blocks=num_blocks,
        block_bytes=limits.block_bytes,
        window_bytes=limits.window_bytes,
    )
    try:
        return make(folder=folder)
    except OSError as error:
        num_bytes = num_blocks * limits.block_bytes + limits.window_bytes
        log.warning("decode.intake.shm_full", num_bytes=num_bytes, reason=str(error))
        return make(folder=None)


def check_reserve(request: ReserveRequest, limits: Limits, *, boot_id: str) -> None:
    """Raise what is wrong with a reservation: another boot or model, or too much KV."""
    if request.boot_id != boot_id:
        raise BlocksLost("this replica was restarted since it was picked")
    if request.fingerprint != limits.fingerprint:
        raise BlocksLost("the blocks were computed for another model fingerprint than this replica's")
    if request.window_bytes != limits.window_bytes:
        raise InvalidRequest(
            f"the KV layouts differ: a window state of {request.window_bytes} bytes is to be handed over"
            f" where one has {limits.window_bytes}"
        )
    if len(request.block_keys) != request.kv_tokens // limits.block_tokens or request.kv_tokens < 1:
        raise InvalidRequest(f"{len(request.block_keys)} block keys do not name {request.kv_tokens} tokens of KV")
    if request.kv_tokens >= limits.context_tokens:
        raise PromptTooLong(f"{request.kv_tokens} tokens of KV do not fit; {limits.context_tokens - 1} would")
    if not request.deadline_unix_seconds > time.time():  # a NaN has passed as well: it would confuse every timer
        raise DeadlinePassed("the handoff's deadline passed")


def check_commit(reservation: Reservation, request: CommitRequest, limits: Limits) -> None:
    """Raise what is wrong with a commit: other blocks than were reserved, or a token that does not exist."""
    if request.kv_tokens != reservation.kv_tokens or len(request.block_xxh3) != reservation.missing_blocks:
        raise BlocksLost(
            f"{len(request.block_xxh3)} blocks for {request.kv_tokens} tokens were committed where"
            f" {reservation.missing_blocks} for {reservation.kv_tokens} were reserved"
        )
    if request.first_token_id >= limits.vocab_tokens:
        raise InvalidRequest(f"the first token must be below {limits.vocab_tokens}")
