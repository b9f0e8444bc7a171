"""How do gRPC calls reach the engine and the intake?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kernels.kv.pool import BlockPool
from proto.common_pb2 import FINISH_REASON_ERROR, TokenEvent, TokenFrame
from proto.decode_pb2 import (
    AbortReply,
    AbortRequest,
    CommitReply,
    CommitRequest,
    DecodeCommand,
    DecodeLoad,
    DecodeSubmit,
    GetDecodeLoadRequest,
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
from proto.events_pb2 import LoadReport
from services.chassis.embeddings import EmbeddingsRoom, EmbeddingsSource
from services.chassis.engine_thread import EngineThread
from services.chassis.errors import NoReplica, to_stream_error
from services.chassis.handoff import StagingFolder
from services.chassis.handoff_push import PUSH_METHOD, parse_piece
from services.chassis.kvstore_client import Stores
from services.chassis.kvstore_writer import BlockWriter, Writeback
from services.chassis.load_reports import report_load
from services.chassis.request_tasks import RequestStream, RequestTasks
from services.chassis.service import Service
from services.chassis.telemetry import log
from services.chassis.window_metrics import WindowStoreCollector
from services.decode.config import DecodeSettings
from services.decode.engine import RECOMPUTE_TOKENS, DecodeEngine, Load
from services.decode.flow import AnswerFlow, Surroundings
from services.decode.intake import RESERVATION_SECONDS, WAIT_SECONDS, Intake
from services.decode.lanes import Lanes
from services.decode.metrics import PREFIX, DecodeMetrics, LoadCollector
from services.decode.model import card_of, limits_of, load_model, open_grammars
from services.decode.states import States, open_worker, states_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.executor import Executor
    from kernels.grammar import GrammarFactory
    from services.chassis.window_store import WindowWorker

WRITEBACK_BYTES = 256 << 20
"""Copies of blocks that wait for the KV store."""

Stream = RequestStream[TokenEvent, TokenFrame]


class Servicer(DecodeServicer):
    """Run, the handoff's calls and GetLoad over one engine."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self.tasks: RequestTasks[TokenEvent, TokenFrame] = RequestTasks(
            lambda events, number: TokenFrame(events=events, sequence=number)
        )

    def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[TokenFrame]:  # noqa: ARG002 - gRPC's signature
        return self.tasks.serve(request_iterator, self._on_command)

    async def Reserve(self, request: ReserveRequest, context: Any) -> ReserveReply:  # noqa: ARG002 - gRPC's signature
        return await self._around.intake.reserve(request)

    async def Push(self, request_iterator: Any, context: Any) -> PushReply:  # noqa: ARG002 - gRPC's signature
        return PushReply(num_bytes=await self._around.intake.push(request_iterator))  # of `Piece`

    async def Commit(self, request: CommitRequest, context: Any) -> CommitReply:  # noqa: ARG002 - gRPC's signature
        await self._around.intake.commit(request)
        return CommitReply()

    async def Abort(self, request: AbortRequest, context: Any) -> AbortReply:  # noqa: ARG002 - gRPC's signature
        self._around.intake.abort(request.ticket, request.reason)
        return AbortReply()

    async def GetLoad(self, request: GetDecodeLoadRequest, context: Any) -> DecodeLoad:  # noqa: ARG002 - gRPC's signature
        load = self._around.engine.load
        return DecodeLoad(
            total_blocks=load.total_blocks,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
            running_sequences=load.running_sequences,
            queued_sequences=load.queued_sequences,
            kv_tokens=load.kv_tokens,
            num_preemptions=load.num_preemptions,
        )

    def _on_command(self, command: DecodeCommand, stream: Stream) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(command.submit, stream)
            case "cancel":
                self.tasks.cancel(command.cancel.request_id, command.cancel.reason)
                self._around.intake.refuse_request(command.cancel.request_id)

    def _submit(self, submit: DecodeSubmit, stream: Stream) -> None:
        request_id = submit.request.request_id
        if self.tasks.is_draining:
            refusal = to_stream_error(NoReplica("this decode replica is shutting down"))
            stream.send(TokenEvent(request_id=request_id, finish_reason=FINISH_REASON_ERROR, error=refusal))
            return
        self._around.intake.admit_request(request_id)
        stream.start(request_id, AnswerFlow(submit, self._around, stream.send).run())


class HoldServicer(IntakeServicer):
    """Hold, over the same intake."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def Hold(self, request: ReserveRequest, context: Any) -> AsyncIterator[HoldReply]:  # noqa: ARG002 - gRPC's signature
        return self._intake.hold(request)


def add_to_server(replica: Replica, server: grpc.aio.Server) -> None:
    """Serve all that a replica offers."""
    add_DecodeServicer_to_server(replica.servicer, server)
    add_IntakeServicer_to_server(HoldServicer(replica.intake), server)
    push = grpc.stream_unary_rpc_method_handler(
        replica.servicer.Push, request_deserializer=parse_piece, response_serializer=PushReply.SerializeToString
    )
    service, _, method = PUSH_METHOD[1:].partition("/")
    server.add_registered_method_handlers(service, {method: push})  # in the place of the generated one


@dataclass(frozen=True, slots=True)
class Replica:
    """A decode replica without its process."""

    servicer: Servicer
    engine: DecodeEngine
    intake: Intake
    writer: BlockWriter | None
    states: States


def assemble(
    executor: Executor,
    thread: EngineThread,
    metrics: DecodeMetrics,
    *,
    replica: str,
    boot_id: str,
    max_batch: int,
    folder: Path | None,
    channel: Callable[[str], grpc.aio.Channel],
    kvstore: Stores | None = None,
    windows: WindowWorker | None = None,
    grammars: GrammarFactory | None = None,
    recompute_tokens: int = RECOMPUTE_TOKENS,
    wait_seconds: float = WAIT_SECONDS,
    reservation_seconds: float = RESERVATION_SECONDS,
) -> Replica:
    """Put engine, intake and servicer together around a loaded model; the thread drives the engine from here on.

    folder: private and in shared memory; None has all bytes travel.  channel: the cached one to an address.
    windows: the host's saved window states; None keeps and finds none.  grammars: None obeys none.
    """
    writer = None
    if kvstore is not None:
        writer = BlockWriter(
            kvstore, fingerprint=executor.fingerprint, max_bytes=WRITEBACK_BYTES, on_drop=metrics.count_write_drop
        )
    states = States(executor, windows)
    engine = DecodeEngine(
        executor,
        BlockPool(executor.num_blocks, executor.layout.block_tokens),
        max_batch=max_batch,
        tell=thread.tell,
        writeback=Writeback(executor.fetch_block, executor.layout.block_bytes, writer),
        states=states,
        on_step=metrics.step_seconds.observe,
        recompute_tokens=recompute_tokens,
    )
    thread.drive(engine.turn)
    limits = limits_of(executor, obeys_grammars=grammars is not None)
    intake = Intake(
        thread,
        engine.rooms,
        limits,
        replica=replica,
        boot_id=boot_id,
        folder=folder,
        counters=metrics,
        wait_seconds=wait_seconds,
        reservation_seconds=reservation_seconds,
    )
    embeddings = EmbeddingsSource(channel, EmbeddingsRoom(), limits.embedding_bytes)
    around = Surroundings(engine, thread, intake, limits, states, grammars, embeddings)
    return Replica(Servicer(around), engine, intake, writer, states)


async def build(service: Service) -> None:
    """Load the model in the engine thread, then serve it."""
    settings = service.settings
    assert isinstance(settings, DecodeSettings)
    thread = EngineThread("decode engine")
    thread.start()
    service.on_stop(thread.stop)
    service.spawn(thread.run(), "decode engine")
    executor = await thread.call(load_model, settings, service.progress)
    folder = _staging_folder(service)
    windows = await asyncio.to_thread(open_worker, executor, max_bytes=states_bytes(settings.kv_bytes))
    if windows is not None:
        service.on_stop(windows.close)
        service.metrics.register(WindowStoreCollector(PREFIX, windows.store.counts))
    grammars = open_grammars(executor, settings.model)
    replica = assemble(
        executor,
        thread,
        DecodeMetrics(service.metrics),
        channel=service.channel,
        windows=windows,
        grammars=grammars,
        replica=service.replica,
        boot_id=service.boot_id,
        max_batch=settings.max_batch,
        folder=folder.path if folder is not None else None,
        kvstore=Stores.of(settings.kvstore_address, lambda address: service.channel(address, "kvstore")),
    )
    service.on_drain(replica.servicer.tasks.drain)
    if replica.writer is not None:
        service.spawn(replica.writer.run(), "writeback")
        service.on_drain(replica.writer.flush)
    engine = replica.engine
    service.metrics.register(LoadCollector(lambda: engine.load))
    service.spawn(report_load(service.bus.publish_load, lambda: _report(service, engine.load)), "load reports")
    service.advertise(model=card_of(executor, settings.model), total_blocks=engine.load.total_blocks)
    add_to_server(replica, service.server)
    _open_lanes(service, replica.intake)


def _open_lanes(service: Service, intake: Intake) -> None:
    """Take blocks on a plain socket, too: beside the gRPC port, which a firewall can name; on loopback on any."""
    host, _, port = service.settings.listen.rpartition(":")
    is_local = host in {"127.0.0.1", "localhost", "[::1]"}
    neighbour = 0 if is_local or port in {"0", "65535"} else int(port) + 1
    try:
        lanes = Lanes.open(intake, host.strip("[]"), neighbour)
    except OSError as error:
        log.warning("decode.lanes.unavailable", reason=str(error))
    else:
        service.on_stop(lanes.close)


def _staging_folder(service: Service) -> StagingFolder | None:
    """Make the folder that peers on this host can fill; without shared memory they push over gRPC."""
    try:
        folder = StagingFolder(service.boot_id)
    except OSError as error:
        log.info("decode.intake.no_shm", reason=str(error))
        return None

    async def close() -> None:
        folder.close()

    service.on_stop(close)
    return folder


def _report(service: Service, load: Load) -> LoadReport:
    return LoadReport(
        service=service.name,
        replica=service.replica,
        boot_id=service.boot_id,
        running_sequences=load.running_sequences,
        queued_sequences=load.queued_sequences,
        kv_tokens=load.kv_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
    )
