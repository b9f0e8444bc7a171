"""How does the entrypoint reach everyone else?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from proto.common_pb2 import Heartbeat, TokenEvent, TokenFrame
from proto.decode_lb_pb2_grpc import DecodeLbStub
from proto.decode_pb2 import DecodeCommand
from proto.decode_pb2_grpc import DecodeStub
from proto.prefill_lb_pb2_grpc import PrefillLbStub
from proto.prefill_pb2 import PrefillCommand, PrefillEvent, PrefillFrame
from proto.prefill_pb2_grpc import PrefillStub
from proto.vision_pb2_grpc import VisionStub
from services.chassis.errors import FathomError
from services.chassis.kvstore_shards import parse_replicas
from services.chassis.streams import PeerStream
from services.chassis.telemetry import log
from services.entrypoint.lookup import KvstoreReplicas

if TYPE_CHECKING:
    from grpc import aio

    from services.entrypoint.bookings import Booking
    from services.entrypoint.config import EntrypointSettings
    from services.entrypoint.metrics import EntrypointMetrics

FINISH_SECONDS = 3.0
"""How long `close` waits for releases and cancels on their way."""


class Peers:
    """Stubs of the single services, and one shared stream per replica boot."""

    def __init__(
        self,
        settings: EntrypointSettings,
        channel: Callable[[str], aio.Channel],
        metrics: EntrypointMetrics,
        *,
        boot_id: str,
    ) -> None:
        """channel: address -> channel, cached and closed by its owner. boot_id: ours, for heartbeats."""
        stores = parse_replicas(settings.kvstore_address)
        self.kvstore = KvstoreReplicas(stores, channel) if stores else None
        vision = settings.vision_address
        self.vision = VisionStub(channel(vision)) if vision else None
        self.prefill_lb = PrefillLbStub(channel(settings.prefill_lb_address))
        self.decode_lb = DecodeLbStub(channel(settings.decode_lb_address))
        self.metrics = metrics
        self._channel = channel
        self._heartbeat = Heartbeat(boot_id=boot_id)
        # By boot and not by address: a restarted replica has forgotten every request of the boot before.
        self._prefill: dict[str, PeerStream[PrefillCommand, PrefillFrame]] = {}
        self._decode: dict[str, PeerStream[DecodeCommand, TokenFrame]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def prefill(self, booking: Booking) -> PeerStream[PrefillCommand, PrefillFrame]:
        """Return the shared stream to a prefill replica."""
        if booking.boot_id not in self._prefill:
            self._prefill[booking.boot_id] = PeerStream(
                PrefillStub(self._channel(booking.address)).Run,
                lambda: PrefillCommand(heartbeat=self._heartbeat),
                _prefill_events,
                booking.replica,
            )
        return self._prefill[booking.boot_id]

    def decode(self, booking: Booking) -> PeerStream[DecodeCommand, TokenFrame]:
        """Return the shared stream to a decode replica."""
        if booking.boot_id not in self._decode:
            self._decode[booking.boot_id] = PeerStream(
                DecodeStub(self._channel(booking.address)).Run,
                lambda: DecodeCommand(heartbeat=self._heartbeat),
                _decode_events,
                booking.replica,
            )
        return self._decode[booking.boot_id]

    def note_retry(self, leg: str, replica: str, error: FathomError) -> None:
        log.warning("entrypoint.retry", leg=leg, failed_replica=replica, error=error.kind)
        self.metrics.retries.labels(leg).inc()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what a request owes others after its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drop_gone(self, alive: Collection[str]) -> None:
        """Close streams to boots that are neither registered any more nor connected."""
        kinds: tuple[dict[str, PeerStream[Any, Any]], ...] = (self._prefill, self._decode)
        for streams in kinds:
            for boot_id, stream in list(streams.items()):
                if boot_id not in alive and not stream.is_open:
                    del streams[boot_id]
                    await stream.close()

    async def close(self) -> None:
        """Let what is owed go out, then close the streams."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_SECONDS)
        streams: list[PeerStream[Any, Any]] = [*self._prefill.values(), *self._decode.values()]
        for stream in streams:
            await stream.close()


def _prefill_events(frame: PrefillFrame) -> Iterable[tuple[str, PrefillEvent]]:
    return [(event.request_id, event) for event in frame.events]


def _decode_events(frame: TokenFrame) -> Iterable[tuple[str, TokenEvent]]:
    return [(event.request_id, event) for event in frame.events]
