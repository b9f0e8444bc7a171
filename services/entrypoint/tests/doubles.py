"""Scripted peers of the entrypoint: real gRPC servers that stop where a test wants them to, and write down who came."""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any

from proto.common_pb2 import (
    FinishReason,
    ModelCard,
    StreamError,
    TokenEvent,
    TokenFrame,
    Usage,
)
from proto.decode_lb_pb2 import DecodePickReply, DecodeReleaseReply
from proto.decode_lb_pb2_grpc import DecodeLbServicer, add_DecodeLbServicer_to_server
from proto.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from proto.kvstore_pb2 import LookupReply
from proto.kvstore_pb2_grpc import KvstoreServicer, add_KvstoreServicer_to_server
from proto.prefill_lb_pb2 import PrefillPickReply, PrefillReleaseReply
from proto.prefill_lb_pb2_grpc import PrefillLbServicer, add_PrefillLbServicer_to_server
from proto.prefill_pb2 import FirstToken, HandoffDone, LastChunkStarted, PrefillEvent, PrefillFrame
from proto.prefill_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from proto.vision_pb2 import EncodedImage, PrepareReply
from proto.vision_pb2_grpc import VisionServicer, add_VisionServicer_to_server
from services.chassis.errors import NoReplica
from services.chassis.frames import FrameSender, serve_shared

BLOCK_TOKENS = 16
CARD = ModelCard(name="tiny", fingerprint=b"f" * 32, context_tokens=512, block_tokens=BLOCK_TOKENS, vocab_tokens=1000)
FIRST_TOKEN = 100


class Stops:
    """Where a double waits. A test closes a phase beforehand, learns that it was reached, and may open it."""

    def __init__(self, log):
        self.log = log
        self._reached = defaultdict(asyncio.Event)
        self._closed = {}

    def close(self, phase):
        self._closed[phase] = asyncio.Event()

    def open(self, phase):
        self._closed.pop(phase).set()

    async def passing(self, phase):
        self.log.append(phase)
        self._reached[phase].set()
        if phase in self._closed:
            await self._closed[phase].wait()

    async def reached(self, phase):
        async with asyncio.timeout(30):
            await self._reached[phase].wait()


class KvstoreDouble(KvstoreServicer):
    address = ""

    def __init__(self, stops):
        self.stops = stops
        self.num_blocks = 0
        self.asked = []

    def add(self, server):
        add_KvstoreServicer_to_server(self, server)

    async def Lookup(self, request, context):
        self.asked.append(request)
        await self.stops.passing("lookup")
        return LookupReply(num_blocks=min(self.num_blocks, len(request.block_keys)))


class VisionDouble(VisionServicer):
    """Fills three tokens' worth with any image, plus the marks."""

    address = ""

    def __init__(self, stops):
        self.stops = stops
        self.asked = []
        self.errors = []
        """Raised one after the other, before anything is prepared."""
        self.fingerprint = b"v" * 32
        self.num_tokens = 6
        self.named = "vision-0:50051"
        """Where it says the embeddings are."""

    def add(self, server):
        add_VisionServicer_to_server(self, server)

    async def Prepare(self, request, context):
        self.asked.append(request)
        await self.stops.passing("vision")
        if self.errors:
            raise self.errors.pop(0)
        images = [EncodedImage(content_hash=each.content_hash, num_tokens=self.num_tokens) for each in request.images]
        return PrepareReply(images=images, address=self.named, fingerprint=self.fingerprint)


class LbDouble:
    """Gives out the first replica that is not excluded, and counts what is booked."""

    address = ""

    def __init__(self, kind, stops):
        self.kind = kind
        self.stops = stops
        self.replicas = []
        self.picks = []
        self.booked = {}
        self.refusals = []

    async def pick(self, request, reply):
        self.picks.append(request)
        if self.refusals:
            raise self.refusals.pop(0)
        for name, address, boot_id in self.replicas:
            if name not in request.exclude:
                booking_id = f"{self.kind}-booking-{len(self.picks)}"
                self.booked[booking_id] = name
                await self.stops.passing(f"{self.kind}_pick")
                return reply(replica=name, address=address, boot_id=boot_id, booking_id=booking_id)
        raise NoReplica(f"no {self.kind} replica is ready")


class PrefillLbDouble(LbDouble, PrefillLbServicer):
    def add(self, server):
        add_PrefillLbServicer_to_server(self, server)

    async def Pick(self, request, context):
        return await self.pick(request, PrefillPickReply)

    async def Release(self, request, context):
        self.booked.pop(request.booking_id)
        return PrefillReleaseReply()


class DecodeLbDouble(LbDouble, DecodeLbServicer):
    def add(self, server):
        add_DecodeLbServicer_to_server(self, server)

    async def Pick(self, request, context):
        return await self.pick(request, DecodePickReply)

    async def Release(self, request, context):
        self.booked.pop(request.booking_id)
        return DecodeReleaseReply()


class EngineDouble(ABC):
    """What the two engines' doubles share: a stream of commands, one scripted task a request, cancels noted."""

    address = ""

    def __init__(self, name, stops):
        self.name = name
        self.stops = stops
        self.submitted = []
        self.cancelled = []
        self.errors = {}
        """Phase -> error that this replica reports instead of going on."""

    @staticmethod
    @abstractmethod
    def make_frame(events, sequence):
        """Build this engine's kind of frame."""

    @abstractmethod
    async def script(self, request, put):
        """Play one request."""

    @staticmethod
    @abstractmethod
    def failure(request_id, error):
        """Build the event that reports an error."""

    async def Run(self, request_iterator, context):
        sender: FrameSender[Any, Any] = FrameSender(self.make_frame)
        tasks = {}

        async def on_command(command):
            if command.HasField("submit"):
                request = command.submit.request
                self.submitted.append(command.submit)
                tasks[request.request_id] = asyncio.create_task(self._script(request, sender.put))
            elif command.HasField("cancel"):
                self.cancelled.append(command.cancel.reason)
                tasks[command.cancel.request_id].cancel()
            else:
                self.take(command)

        try:
            async for frame in serve_shared(request_iterator, sender, on_command):
                yield frame
        finally:
            for task in tasks.values():
                task.cancel()

    def take(self, command):
        """Take a command that is neither submit nor cancel; here a heartbeat."""
        assert command.HasField("heartbeat")

    async def _script(self, request, put):
        try:
            await self.script(request, put)
        except ReportedError as failed:
            put(self.failure(request.request_id, failed.error))

    async def passing(self, phase):
        await self.stops.passing(phase)
        if phase in self.errors:
            raise ReportedError(self.errors[phase])


class ReportedError(Exception):
    def __init__(self, error: StreamError):
        super().__init__()
        self.error = error


class PrefillDouble(EngineDouble, PrefillServicer):
    def __init__(self, name, stops, decodes):
        super().__init__(name, stops)
        self.decodes = decodes
        self.delivers = {}
        self.deliver_log = []
        self.first_finish = FinishReason.FINISH_REASON_UNSPECIFIED
        self.cached_tokens = 0

    def add(self, server):
        add_PrefillServicer_to_server(self, server)

    @staticmethod
    def make_frame(events, sequence):
        return PrefillFrame(events=events, sequence=sequence)

    def take(self, command):
        if command.HasField("deliver"):
            self.deliver_log.append(command.deliver.replica)
            self._delivered(command.deliver.request_id).set()
            self.delivers[command.deliver.request_id] = command.deliver

    def _delivered(self, request_id):
        return self.delivers.setdefault(("event", request_id), asyncio.Event())

    async def script(self, request, put):
        request_id = request.request_id
        await self.passing("prefill")
        finish = self.first_finish
        if request.stop.max_tokens == 1:
            finish = FinishReason.FINISH_REASON_LENGTH
        if request.stop.max_tokens > 1:
            kv_tokens = len(request.prompt_token_ids)
            put(PrefillEvent(request_id=request_id, last_chunk_started=LastChunkStarted(kv_tokens=kv_tokens)))
            await self._delivered(request_id).wait()
        await self.passing("first_token")
        token = TokenEvent(request_id=request_id, token_ids=[FIRST_TOKEN], finish_reason=finish)
        put(PrefillEvent(request_id=request_id, first_token=FirstToken(token=token, cached_tokens=self.cached_tokens)))
        if finish:
            return
        await self.passing("handoff")
        decode = self.decodes[self.delivers[request_id].replica]
        decode.commit(request_id)
        await self.passing("handoff_done")
        put(PrefillEvent(request_id=request_id, handoff_done=HandoffDone(replica=decode.name, backend="shm")))

    @staticmethod
    def failure(request_id, error):
        return PrefillEvent(request_id=request_id, failed=error)


class DecodeDouble(EngineDouble, DecodeServicer):
    def __init__(self, name, stops):
        super().__init__(name, stops)
        self.committed = defaultdict(asyncio.Event)

    def add(self, server):
        add_DecodeServicer_to_server(self, server)

    @staticmethod
    def make_frame(events, sequence):
        return TokenFrame(events=events, sequence=sequence)

    def commit(self, request_id):
        self.committed[request_id].set()

    async def script(self, request, put):
        """Counts up from the first token, one a step, until max_tokens; its own usage is wrong on purpose."""
        await self.passing("decode_submit")
        await self.committed[request.request_id].wait()
        for number in range(1, request.stop.max_tokens):
            is_last = number == request.stop.max_tokens - 1
            finish = FinishReason.FINISH_REASON_LENGTH if is_last else FinishReason.FINISH_REASON_UNSPECIFIED
            await self.passing(f"decode_{number}")
            put(
                TokenEvent(
                    request_id=request.request_id,
                    token_ids=[FIRST_TOKEN + number],
                    finish_reason=finish,
                    usage=Usage(prompt_tokens=1, cached_tokens=999, completion_tokens=7),
                )
            )
            await asyncio.sleep(0)

    @staticmethod
    def failure(request_id, error):
        return TokenEvent(request_id=request_id, finish_reason=FinishReason.FINISH_REASON_ERROR, error=error)
