"""A decode replica on a real gRPC server, and the other side of its handoffs: an executor that computes prompts."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kernels.batch import Batch, Image, Row
from kernels.executor import Executor
from kernels.grammar import Matcher
from proto.common_pb2 import Cancel, Heartbeat, Request, SamplingParams, StopRules, Ticket, TokenEvent, TokenFrame
from proto.decode_pb2 import (
    CommitRequest,
    DecodeCommand,
    DecodeSubmit,
    HoldReply,
    PushChunk,
    PushReply,
    ReserveReply,
    ReserveRequest,
)
from proto.decode_pb2_grpc import DecodeStub, IntakeStub
from services.chassis.block_keys import block_keys, image_extras
from services.chassis.channel import open_channel
from services.chassis.engine_thread import EngineThread
from services.chassis.handoff import PeerStaging, block_xxh3
from services.chassis.handoff_push import encode_pieces
from services.chassis.kvstore_writer import BlockWriter
from services.chassis.streams import PeerStream
from services.chassis.testing import serve
from services.chassis.window_store import WindowWorker
from services.decode.lanes import Lanes
from services.decode.metrics import DecodeMetrics
from services.decode.model import replay_of
from services.decode.sampling import has_penalties, sampling_params
from services.decode.server import Replica, add_to_server, assemble
from services.decode.states import open_worker
from services.decode.tests.lane_peer import open_lane, send, tell
from services.decode.tests.tiny_model import write_tiny_model

BLOCK = 16
NUM_WINDOWS = 6
ROOT = b"r" * 32
BOOT = "boot-1"


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
    extra = image_extras(wanted.images, block_tokens=BLOCK)
    return block_keys(ROOT, wanted.prompt_token_ids, block_tokens=BLOCK, extra=extra)


@dataclass(frozen=True)
class Computed:
    """What a prefill replica would hold of a request."""

    blocks: tuple[bytes, ...]
    first_token_id: int
    window: bytes


class Source:
    """Computes prompts, and whole answers as the yardstick, on an executor of its own."""

    def __init__(self, folder: Path) -> None:
        self.executor = load(folder, 42)  # not the replica's: their caches must not mix

    def prompt(self, wanted: Request, images: tuple[Image, ...] = (), allowed: bytes | None = None) -> Computed:
        tokens = list(wanted.prompt_token_ids)
        table = list(range(1, 2 + len(tokens) // BLOCK))
        token = self._sample(wanted, tokens, 0, table, images, allowed)
        num_blocks = -(-len(tokens) // BLOCK)
        blocks = tuple(self.executor.read_block(block) for block in table[:num_blocks])
        return Computed(blocks, token, self.executor.read_window(self._window))

    def answer(self, wanted: Request, images: tuple[Image, ...] = (), matcher: Matcher | None = None) -> list[int]:
        """All tokens of the answer: computed alone, in one process."""
        tokens = list(wanted.prompt_token_ids)
        table = list(range(1, 40))
        end = len(tokens) + wanted.stop.max_tokens
        start = 0
        while len(tokens) < end:
            allowed = matcher.mask() if matcher is not None else None
            token = self._sample(wanted, tokens, start, table, () if start else images, allowed)
            start = len(tokens)
            tokens.append(token)
            if matcher is not None:
                matcher.accept(token)
            if token in wanted.stop.stop_token_ids or (matcher is not None and matcher.is_finished):
                break
        return tokens[len(wanted.prompt_token_ids) :]

    @property
    def _window(self) -> int:
        return min(1, self.executor.num_windows)

    def _sample(
        self,
        wanted: Request,
        tokens: list[int],
        start: int,
        table: list[int],
        images: tuple[Image, ...],
        allowed: bytes | None,
    ) -> int:
        if start == 0:
            self.executor.reset_window(self._window)
        sampling = sampling_params(wanted.sampling)
        row = Row(
            sequence=0,
            token_ids=tokens[start:],
            position=start,
            block_table=table,
            sampling=sampling,
            history=list(tokens) if has_penalties(sampling) else (),
            num_prompt_tokens=len(wanted.prompt_token_ids),
            allowed_mask=allowed,
            window=self._window,
            preceding=tokens[max(start - self.executor.preceding_tokens, 0) : start],
            images=images,
        )
        return self.executor.collect(self.executor.launch(Batch((row,))))[0].token_id


@dataclass
class Rig:
    """One replica and everything to talk to it."""

    replica: Replica
    stub: Any
    holds: Any
    """Stub of the intake."""
    stream: PeerStream[DecodeCommand, TokenFrame]
    source: Source
    fingerprint: bytes
    address: str

    @property
    def states(self) -> WindowWorker:
        assert self.replica.states.worker is not None, "the replica was given a folder for states"
        return self.replica.states.worker

    @property
    def writer(self) -> BlockWriter:
        assert self.replica.writer is not None, "the replica was given a store"
        return self.replica.writer

    async def submit(self, wanted: Request) -> Any:
        """Submit and return the subscription of its events."""
        wanted.fingerprint = wanted.fingerprint or self.fingerprint
        events = await self.stream.open_request(wanted.request_id)
        await self.stream.send(DecodeCommand(submit=DecodeSubmit(request=wanted)))
        return events

    async def cancel(self, request_id: str) -> None:
        await self.stream.send(DecodeCommand(cancel=Cancel(request_id=request_id, reason="test")))

    def ask(self, wanted: Request, **changes: Any) -> ReserveRequest:
        """What prefill asks for."""
        tokens = wanted.prompt_token_ids
        asked: dict[str, Any] = {
            "request_id": wanted.request_id,
            "fingerprint": self.fingerprint,
            "boot_id": BOOT,
            "block_keys": keys_of(wanted),
            "window_bytes": self.source.executor.layout.window_bytes,
            "kv_tokens": len(tokens),
            "deadline_unix_seconds": wanted.deadline_unix_seconds,
        }
        return ReserveRequest(**(asked | changes))

    async def reserve(self, wanted: Request, **changes: Any) -> ReserveReply:
        reply: ReserveReply = await self.stub.Reserve(self.ask(wanted, **changes), timeout=20)
        return reply

    async def hold(self, wanted: Request) -> tuple[Any, ReserveReply]:
        """Reserve as prefill does, and keep the room with the call that is returned too."""
        call: Any = self.holds.Hold(self.ask(wanted), timeout=20)
        async with asyncio.timeout(20):
            first: HoldReply = await call.read()
        return call, first.reserved

    async def push(self, reply: ReserveReply, blocks: tuple[bytes, ...], window: bytes = b"") -> list[int]:
        """Send the missing blocks and the window the way the reservation says; return the blocks' checksums."""
        missing = blocks[reply.present_blocks :]
        crcs = [block_xxh3(block) for block in missing]
        if reply.lane_port and not reply.shm_path:
            await asyncio.to_thread(send, await open_lane(reply, shares_file=False), missing, window)
            return crcs
        if reply.shm_path:
            fill(
                PeerStaging(
                    reply.shm_path,
                    nonce=reply.ticket.nonce,
                    num_blocks=len(missing),
                    block_bytes=self.source.executor.layout.block_bytes,
                    window_bytes=len(window),
                ),
                missing,
                window,
            )
            if reply.lane_port:
                lane = await open_lane(reply, shares_file=True)
                await asyncio.to_thread(tell, lane, len(missing), has_window=bool(window))
            return crcs
        if missing or window:
            await self.stub.Push(self._chunks(reply, missing, window), timeout=20)
        return crcs

    def _chunks(self, reply: ReserveReply, missing: tuple[bytes, ...], window: bytes) -> Any:
        ticket: Ticket | None = reply.ticket
        for index, block in enumerate(missing, start=reply.present_blocks):
            yield from _chunks_of(block, block_index=index, ticket=ticket)
            ticket = None
        yield from _chunks_of(window, ticket=ticket, is_window=True)

    async def begin_push(
        self, reply: ReserveReply, chunks: Sequence[PushChunk]
    ) -> tuple[asyncio.Task[PushReply], asyncio.Event]:
        """Start a `Push` that decode has taken the first chunk of; the others come once the event is set."""
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[PushChunk]:
            yield chunks[0]
            begun.set()
            await go_on.wait()
            for chunk in chunks[1:]:
                yield chunk

        async def push() -> PushReply:
            taken: PushReply = await self.stub.Push(slowly(), timeout=20)
            return taken

        pushing = asyncio.create_task(push())
        await begun.wait()
        await until(lambda: self.replica.intake._handoffs[reply.ticket.epoch].is_pushed)
        return pushing, go_on

    async def commit(
        self, wanted: Request, reply: ReserveReply, crcs: list[int], first_token_id: int, window_xxh3: int = 0
    ) -> None:
        commit = CommitRequest(
            ticket=reply.ticket,
            block_xxh3=crcs,
            kv_tokens=len(wanted.prompt_token_ids),
            first_token_id=first_token_id,
            window_xxh3=window_xxh3,
        )
        await self.stub.Commit(commit, timeout=20)

    async def hand_over(
        self, wanted: Request, images: tuple[Image, ...] = (), allowed: bytes | None = None
    ) -> Computed:
        """Do all that prefill does.  allowed: mask of the first token."""
        computed = self.source.prompt(wanted, images, allowed)
        reply = await self.reserve(wanted)
        crcs = await self.push(reply, computed.blocks, computed.window)
        window_xxh3 = block_xxh3(computed.window) if computed.window else 0
        await self.commit(wanted, reply, crcs, computed.first_token_id, window_xxh3)
        return computed

    async def answer(self, wanted: Request, images: tuple[Image, ...] = ()) -> list[int]:
        """Submit, hand over, and return the whole answer."""
        events = await self.submit(wanted)
        computed = await self.hand_over(wanted, images)
        found = await collect(events)
        assert not found[-1].HasField("error"), found[-1].error
        return [computed.first_token_id, *tokens_of(found)]

    async def idle(self) -> None:
        """Wait until nobody holds a block."""
        await until(lambda: not (self.replica.engine.load.used_blocks or self.replica.engine.load.queued_sequences))
        assert 0 == self.replica.intake.num_open
        assert 0 == self.replica.engine._windows.used_windows


@asynccontextmanager
async def decode_replica(
    folder: Path,
    *,
    num_blocks: int = 41,
    shm: Path | None = None,
    has_lanes: bool = False,
    states: Path | None = None,
    run_ahead: bool | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Run a replica in this process. num_blocks counts the null block; states: where the window store is, if any.

    has_lanes: blocks come past gRPC.  run_ahead: True plans each step while the last one's tokens are not known, as on
    a GPU.
    """
    thread = EngineThread("decode engine")
    thread.start()
    executor = load(folder, num_blocks, run_ahead=run_ahead)
    channels: dict[str, Any] = {}

    def channel_to(address: str) -> Any:
        if address not in channels:
            channels[address] = open_channel(address, peer="vision")
        return channels[address]

    asked: dict[str, Any] = {"replica": "decode-0", "boot_id": BOOT, "max_batch": 8, "folder": shm}
    worker = open_worker(executor, max_bytes=1 << 22, root=states) if states is not None else None
    asked |= {"channel": channel_to, "windows": worker} | options
    replica = assemble(executor, thread, DecodeMetrics(CollectorRegistry()), **asked)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serve(lambda server: add_to_server(replica, server)))
        if has_lanes:
            stack.push_async_callback(Lanes.open(replica.intake, "127.0.0.1", 0).close)
        channel = open_channel(address, peer="decode")
        stub: Any = DecodeStub(channel)
        stream: PeerStream[DecodeCommand, TokenFrame] = PeerStream(
            stub.Run, lambda: DecodeCommand(heartbeat=Heartbeat()), _events, "decode"
        )
        try:
            yield Rig(replica, stub, IntakeStub(channel), stream, Source(folder), executor.fingerprint, address)
        finally:
            await stream.close()
            replica.intake.close()
            for each in (channel, *channels.values()):
                await each.close()
    await thread.stop()
    if worker is not None:
        await worker.close()


def fill(staging: PeerStaging, blocks: Sequence[bytes], window: bytes = b"") -> None:
    """Write blocks and window as a peer on this host does, and let go of the file."""
    for place, block in enumerate(blocks):
        staging.block(place)[:] = block
    staging.window()[:] = window
    assert staging.close()


def _chunks_of(payload: bytes, **where: Any) -> list[PushChunk]:
    return [PushChunk.FromString(message) for message in encode_pieces(memoryview(payload), **where)]


def _events(frame: TokenFrame) -> list[tuple[str, TokenEvent]]:
    return [(event.request_id, event) for event in frame.events]


async def collect(events: Any) -> list[TokenEvent]:
    """Return a request's events up to the last; fail after a minute."""
    found = []
    async with asyncio.timeout(60), events:
        async for event in events:
            found.append(event)
            if event.finish_reason:
                return found
    raise AssertionError("the events ended without a last one")


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def until(holds: Callable[[], object]) -> None:
    """Wait until it holds; fail after twenty seconds. Two are the promise for giving things back, on a quiet machine."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - looks at what the engine thread shows
            await asyncio.sleep(0.002)
