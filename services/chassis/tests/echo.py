"""Small real servicers for the chassis's own tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from grpc import aio

from proto.common_pb2 import TokenEvent, TokenFrame
from proto.decode_pb2 import DecodeCommand
from proto.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from proto.kvstore_pb2 import BlockChunk, LookupReply, LookupRequest, ReadRequest, WriteReply
from proto.kvstore_pb2_grpc import KvstoreServicer, add_KvstoreServicer_to_server
from services.chassis import telemetry
from services.chassis.frames import FrameSender, serve_shared


class EchoKvstore(KvstoreServicer):
    """Lookup raises or waits as told; Read streams; Write counts."""

    def __init__(self) -> None:
        self.num_lookups = 0
        self.errors: list[Exception] = []
        self.hold: asyncio.Event | None = None
        self.cancelled = asyncio.Event()
        self.seen_traceparent = ""
        self.seen_request_id = ""
        self.seen_remaining = 0.0

    async def Lookup(self, request: LookupRequest, context: Any) -> LookupReply:
        self.num_lookups += 1
        self.seen_traceparent = telemetry.current_traceparent()
        self.seen_request_id = telemetry.request_id()
        self.seen_remaining = context.time_remaining() or 0.0
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if self.errors:
            raise self.errors.pop(0)
        return LookupReply(num_blocks=len(request.block_keys))

    async def Read(self, request: ReadRequest, context: Any) -> AsyncIterator[BlockChunk]:
        for key in request.block_keys:
            if self.errors:
                raise self.errors.pop(0)
            yield BlockChunk(block_key=key)

    async def Write(self, request_iterator: AsyncIterator[BlockChunk], context: Any) -> WriteReply:
        return WriteReply(num_stored=len([chunk async for chunk in request_iterator]))

    async def _absent(self, request: Any, context: Any) -> Any:
        """No test of the chassis calls the others."""
        raise NotImplementedError

    GetStats = Pin = Release = Locate = Evict = _absent
    Verify = _absent  # type: ignore[assignment]  # streams

    def add(self, server: aio.Server) -> None:
        add_KvstoreServicer_to_server(self, server)


def token_frame(events: Iterable[TokenEvent], sequence: int) -> TokenFrame:
    return TokenFrame(events=events, sequence=sequence)


class EchoDecode(DecodeServicer):
    """Answers each submit with the request's prompt tokens, one event each; the last one of a stream stays reachable."""

    def __init__(self, *, silence_seconds: float = 10.0, heartbeat_seconds: float = 1.0) -> None:
        self.silence_seconds = silence_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self.sender: FrameSender[TokenEvent, TokenFrame] | None = None
        self.commands: list[DecodeCommand] = []
        self.num_streams = 0
        self.seen_metadata: set[str] = set()
        self.on_submit: Callable[[DecodeCommand], None] | None = None
        self.ended = asyncio.Event()

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[TokenFrame]:
        sender = FrameSender(token_frame, heartbeat_seconds=self.heartbeat_seconds)
        self.sender = sender
        self.num_streams += 1
        self.seen_metadata = {key for key, _ in context.invocation_metadata()}

        async def on_command(command: DecodeCommand) -> None:
            self.commands.append(command)
            if command.HasField("submit"):
                request = command.submit.request
                for token_id in request.prompt_token_ids:
                    sender.put(TokenEvent(request_id=request.request_id, token_ids=[token_id]))

        try:
            async for frame in serve_shared(request_iterator, sender, on_command, silence_seconds=self.silence_seconds):
                yield frame
        finally:
            self.ended.set()

    async def Reserve(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Push(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Commit(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Abort(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetLoad(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def add(self, server: aio.Server) -> None:
        add_DecodeServicer_to_server(self, server)
