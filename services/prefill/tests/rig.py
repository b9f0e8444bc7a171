"""A prefill replica on a real gRPC server, and a decode replica that keeps what it is handed."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kernels.batch import Batch, Image, Row
from kernels.executor import Executor
from proto.common_pb2 import Cancel, Heartbeat, Request, SamplingParams, StopRules, Ticket, TokenFrame
from proto.decode_pb2 import (
    AbortReply,
    CommitReply,
    CommitRequest,
    DecodeLoad,
    HoldReply,
    PushReply,
    ReserveReply,
    ReserveRequest,
)
from proto.decode_pb2_grpc import (
    DecodeServicer,
    IntakeServicer,
    add_DecodeServicer_to_server,
    add_IntakeServicer_to_server,
)
from proto.prefill_pb2 import PrefillCommand, PrefillDeliver, PrefillEvent, PrefillFrame, PrefillSubmit
from proto.prefill_pb2_grpc import PrefillStub, add_PrefillServicer_to_server
from services.chassis.block_keys import block_keys
from services.chassis.channel import open_channel
from services.chassis.engine_thread import EngineThread
from services.chassis.errors import BlocksLost
from services.chassis.handoff import Staging, block_xxh3
from services.chassis.handoff_push import check_piece, parse_piece
from services.chassis.kvstore_writer import BlockWriter
from services.chassis.streams import PeerStream
from services.chassis.testing import serve
from services.chassis.window_store import WindowWorker
from services.prefill.metrics import PrefillMetrics
from services.prefill.model import replay_of
from services.prefill.sampling import sampling_params
from services.prefill.server import Replica, assemble
from services.prefill.states import open_worker
from services.prefill.tests.tiny_model import write_tiny_model

BLOCK = 16
NUM_WINDOWS = 6
ROOT = b"r" * 32
BOOT = "decode-boot"


@functools.cache
def load(folder: Path, num_blocks: int, *, run_ahead: bool | None = None) -> Executor:
    """Load a tiny model; one executor per pool size and way of running is shared by all tests."""
    if not folder.exists():
        write_tiny_model(folder)
    asked: dict[str, Any] = {"num_blocks": num_blocks, "block_tokens": BLOCK, "num_windows": NUM_WINDOWS}
    asked["run_ahead"] = run_ahead
    return Executor.load(folder, dtype="fp32", threads=1, replay=replay_of(folder), **asked)


def request(name: str, num_tokens: int, *, max_tokens: int = 8, **fields: Any) -> Request:
    """Make a request whose prompt depends on its name and length only."""
    return Request(
        request_id=name,
        prompt_token_ids=[(7 * position + sum(name.encode())) % 90 + 3 for position in range(num_tokens)],
        sampling=fields.pop("sampling", SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1, seed=7)),
        stop=StopRules(max_tokens=max_tokens, stop_token_ids=fields.pop("stop_token_ids", [])),
        deadline_unix_seconds=time.time() + fields.pop("seconds", 120),
        key_root=ROOT,
        **fields,
    )


def keys_of(wanted: Request) -> tuple[bytes, ...]:
    return block_keys(ROOT, wanted.prompt_token_ids, block_tokens=BLOCK)


class Source:
    """Computes a prompt alone, as the yardstick."""

    def __init__(self, folder: Path) -> None:
        self.executor = load(folder, 42)  # not the replica's: their caches must not mix

    def prompt(self, wanted: Request, images: tuple[Image, ...] = ()) -> tuple[list[bytes], int]:
        """Return the prompt's blocks and its first token."""
        tokens = list(wanted.prompt_token_ids)
        table = list(range(1, 2 + len(tokens) // BLOCK))
        sampling = sampling_params(wanted.sampling)
        window = min(1, self.executor.num_windows)
        self.executor.reset_window(window)
        row = Row(0, tokens, 0, table, sampling, history=tokens, window=window, images=images)
        (sampled,) = self.executor.collect(self.executor.launch(Batch((row,))))
        num_blocks = -(-len(tokens) // BLOCK)
        return [self.executor.read_block(block) for block in table[:num_blocks]], sampled.token_id

    def window(self) -> bytes:
        """Return the window state after the last prompt."""
        return self.executor.read_window(min(1, self.executor.num_windows))


class KeepingDecode(DecodeServicer, IntakeServicer):
    """Takes handoffs in and keeps them; `folder` offers shared memory, `present` blocks are said to be here."""

    def __init__(self, folder: Path | None, block_bytes: int) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.present = 0
        self.lane_port = 0
        self.wrong_path = ""
        """Named instead of the true file."""
        self.errors: dict[str, Exception] = {}
        """By method: raised instead of answering."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.passing: set[str] = set()
        """Methods that the gate does not hold up."""
        self.reserved: dict[int, tuple[ReserveRequest, Staging]] = {}
        self.committed: list[tuple[CommitRequest, list[bytes]]] = []
        self.windows: list[bytes] = []
        """Of the committed ones."""
        self.num_pushed = 0
        """Bytes."""
        self.aborted: list[int] = []
        self.held: dict[int, asyncio.Future[Exception | None]] = {}
        """By epoch: set to end the call that holds it."""

    def add(self, server: Any) -> None:
        add_DecodeServicer_to_server(self, server)
        add_IntakeServicer_to_server(self, server)

    async def Hold(self, request: ReserveRequest, context: Any) -> AsyncIterator[HoldReply]:
        reply = await self.Reserve(request, context)
        epoch = reply.ticket.epoch
        ended = self.held[epoch] = asyncio.get_running_loop().create_future()
        try:
            yield HoldReply(reserved=reply)
            while not ended.done():
                await asyncio.wait([ended], timeout=0.5)
                yield HoldReply()
        finally:
            if not ended.done():
                self._end(epoch)
        error = ended.result()
        if error is not None:
            raise error

    def _end(self, epoch: int, error: Exception | None = None) -> None:
        """Give a reservation back."""
        if epoch not in self.aborted:
            self.aborted.append(epoch)
        if not self.held[epoch].done():
            self.held[epoch].set_result(error)

    async def Reserve(self, request: ReserveRequest, context: Any) -> ReserveReply:
        await self._trouble("Reserve")
        epoch = len(self.reserved) + 1
        nonce = bytes([epoch]) * 16
        missing = -(-request.kv_tokens // BLOCK) - self.present
        asked: dict[str, Any] = {"block_bytes": self.block_bytes, "window_bytes": request.window_bytes}
        staging = Staging(nonce=nonce, num_blocks=missing, folder=self.folder, **asked)
        self.reserved[epoch] = request, staging
        ticket = Ticket(boot_id=request.boot_id, epoch=epoch, nonce=nonce, request_id=request.request_id)
        path = self.wrong_path or str(staging.path or "")
        return ReserveReply(ticket=ticket, present_blocks=self.present, shm_path=path, lane_port=self.lane_port)

    async def Push(self, request_iterator: Any, context: Any) -> PushReply:
        await self._trouble("Push")
        staging = None
        num_bytes = 0
        async for chunk in request_iterator:
            check_piece(parse_piece(chunk.SerializeToString()))
            staging = staging or self.reserved[chunk.ticket.epoch][1]
            if chunk.is_window:
                staging.write_window(chunk.offset_bytes, chunk.data)
            else:
                staging.write(chunk.block_index - self.present, chunk.offset_bytes, chunk.data)
            num_bytes += len(chunk.data)
        self.num_pushed += num_bytes
        return PushReply(num_bytes=num_bytes)

    async def Commit(self, request: CommitRequest, context: Any) -> CommitReply:
        await self._trouble("Commit")
        staging = self.reserved[request.ticket.epoch][1]
        blocks = [bytes(staging.block(block)) for block in range(staging.num_blocks)]
        assert list(request.block_xxh3) == [block_xxh3(block) for block in blocks]
        window = bytes(staging.window())
        assert request.window_xxh3 == (block_xxh3(window) if window else 0)
        self.committed.append((request, blocks))
        self.windows.append(window)
        self.held[request.ticket.epoch].set_result(None)
        await self._trouble("Answer")
        return CommitReply()

    async def Abort(self, request: Any, context: Any) -> AbortReply:
        self._end(request.ticket.epoch, BlocksLost(request.reason))
        return AbortReply()

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[TokenFrame]:
        yield TokenFrame()

    async def GetLoad(self, request: Any, context: Any) -> DecodeLoad:
        return DecodeLoad(num_preemptions=0)

    async def _trouble(self, method: str) -> None:
        if method not in self.passing:
            await self.gate.wait()
        if method in self.errors:
            raise self.errors[method]


@dataclass
class Rig:
    """One replica and everything to talk to it."""

    replica: Replica
    stream: PeerStream[PrefillCommand, PrefillFrame]
    stub: Any
    source: Source
    decode: KeepingDecode
    decode_address: str
    fingerprint: bytes
    registry: CollectorRegistry
    boot_id: str = BOOT

    def channel(self) -> Any:
        """The channel to the decode side."""
        return self.replica.servicer._around.channel(self.decode_address)

    @property
    def states(self) -> WindowWorker:
        assert self.replica.states.worker is not None, "the replica was given a folder for states"
        return self.replica.states.worker

    @property
    def writer(self) -> BlockWriter:
        assert self.replica.writer is not None, "the replica was given a store"
        return self.replica.writer

    async def submit(self, wanted: Request, *, hit_tokens: int = 0) -> Any:
        """Submit and return the subscription of its events."""
        wanted.fingerprint = wanted.fingerprint or self.fingerprint
        events = await self.stream.open_request(wanted.request_id)
        await self.stream.send(PrefillCommand(submit=PrefillSubmit(request=wanted, hit_tokens=hit_tokens)))
        return events

    async def deliver(self, request_id: str, address: str = "") -> None:
        target = PrefillDeliver(
            request_id=request_id, replica="decode-0", address=address or self.decode_address, boot_id=self.boot_id
        )
        await self.stream.send(PrefillCommand(deliver=target))

    async def cancel(self, request_id: str) -> None:
        await self.stream.send(PrefillCommand(cancel=Cancel(request_id=request_id, reason="test")))

    async def serve(self, wanted: Request, *, hit_tokens: int = 0) -> list[PrefillEvent]:
        """Submit, deliver when asked, and return all events."""
        found = []
        async with asyncio.timeout(30), await self.submit(wanted, hit_tokens=hit_tokens) as events:
            async for event in events:
                found.append(event)
                if event.HasField("last_chunk_started"):
                    await self.deliver(wanted.request_id)
                if is_last(event):
                    return found
        raise AssertionError("the events ended without a last one")

    async def idle(self) -> None:
        """Wait until nobody holds a block or a window: the engine's thread gives back one after the other."""
        engine = self.replica.engine
        await until(
            lambda: not (engine.load.used_blocks or engine.load.queued_sequences or engine._windows.used_windows)
        )
        engine._pool.check_integrity()


def is_last(event: PrefillEvent) -> bool:
    return bool(event.HasField("handoff_done") or event.HasField("failed") or event.first_token.token.finish_reason)


def kinds(events: list[PrefillEvent]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


@asynccontextmanager
async def prefill_replica(
    folder: Path,
    *,
    num_blocks: int = 41,
    shm: Path | None = None,
    states: Path | None = None,
    run_ahead: bool | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Run a replica in this process.

    num_blocks counts the null block; shm: offered by the decode side; states: where the window store is, if any;
    run_ahead: True plans each step while the device computes the last one, as on a GPU.
    """
    thread = EngineThread("prefill engine")
    thread.start()
    executor = load(folder, num_blocks, run_ahead=run_ahead)
    channels: dict[str, Any] = {}

    def channel(address: str) -> Any:
        if address not in channels:
            channels[address] = open_channel(address, peer="decode")
        return channels[address]

    worker = open_worker(executor, max_bytes=1 << 22, root=states) if states is not None else None
    asked: dict[str, Any] = {"chunk_tokens": 24, "channel": channel, "windows": worker} | options
    registry = CollectorRegistry()
    replica = assemble(executor, thread, PrefillMetrics(registry), **asked)
    writing = asyncio.create_task(replica.writer.run()) if replica.writer is not None else None
    decode = KeepingDecode(shm, executor.layout.block_bytes)
    async with (
        serve(decode.add) as decode_address,
        serve(lambda server: add_PrefillServicer_to_server(replica.servicer, server)) as address,
    ):
        stub: Any = PrefillStub(channel(address))
        stream: PeerStream[PrefillCommand, PrefillFrame] = PeerStream(
            stub.Run, lambda: PrefillCommand(heartbeat=Heartbeat()), _events, "prefill"
        )
        try:
            yield Rig(replica, stream, stub, Source(folder), decode, decode_address, executor.fingerprint, registry)
        finally:
            await stream.close()
            for each in channels.values():
                await each.close()
    for _, staging in decode.reserved.values():
        staging.close()
    await thread.stop()
    if worker is not None:
        await worker.close()
    if writing is not None:
        writing.cancel()


def _events(frame: PrefillFrame) -> list[tuple[str, PrefillEvent]]:
    return [(event.request_id, event) for event in frame.events]


async def until(holds: Callable[[], object]) -> None:
    """Wait until it holds; fail after twenty seconds. Two are the promise for giving things back, on a quiet machine."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - looks at what the engine thread shows
            await asyncio.sleep(0.002)
