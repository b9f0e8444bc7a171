"""How do gRPC calls reach the engine?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.kv.pool import BlockPool
from proto.events_pb2 import LoadReport
from proto.prefill_pb2 import (
    GetPrefillLoadRequest,
    PrefillCommand,
    PrefillDeliver,
    PrefillEvent,
    PrefillFrame,
    PrefillLoad,
    PrefillSubmit,
)
from proto.prefill_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from services.chassis.embeddings import EmbeddingsRoom, EmbeddingsSource
from services.chassis.engine_thread import EngineThread
from services.chassis.errors import FathomError, NoReplica, Overloaded, to_stream_error
from services.chassis.kvstore_client import Stores
from services.chassis.kvstore_writer import BlockWriter, Writeback
from services.chassis.load_reports import report_load
from services.chassis.request_tasks import RequestStream, RequestTasks
from services.chassis.service import Service
from services.chassis.window_metrics import WindowStoreCollector
from services.prefill.config import PrefillSettings
from services.prefill.engine import Load, PrefillEngine
from services.prefill.flow import DELIVER_SECONDS, PromptFlow, Surroundings
from services.prefill.handoff import aborts_said
from services.prefill.metrics import PREFIX, LoadCollector, PrefillMetrics
from services.prefill.model import card_of, limits_of, load_model, open_grammars
from services.prefill.states import States, open_worker, states_bytes

if TYPE_CHECKING:
    import grpc.aio

    from kernels.executor import Executor
    from kernels.grammar import GrammarFactory
    from services.chassis.window_store import WindowWorker

MAX_PROMPTS = 256
"""Prompts here at once. A longer queue would outlive its callers' patience."""
WRITEBACK_BYTES = 256 << 20
"""Copies of blocks that wait for the KV store."""

Stream = RequestStream[PrefillEvent, PrefillFrame]


class Servicer(PrefillServicer):
    """Run and GetLoad over one engine."""

    def __init__(self, around: Surroundings, *, max_prompts: int = MAX_PROMPTS) -> None:
        self._around = around
        self._max_prompts = max_prompts
        self._flows: dict[str, PromptFlow] = {}
        self.tasks: RequestTasks[PrefillEvent, PrefillFrame] = RequestTasks(
            lambda events, number: PrefillFrame(events=events, sequence=number)
        )

    def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[PrefillFrame]:  # noqa: ARG002 - gRPC's signature
        return self.tasks.serve(request_iterator, self._on_command)

    async def GetLoad(self, request: GetPrefillLoadRequest, context: Any) -> PrefillLoad:  # noqa: ARG002 - gRPC's signature
        load = self._around.engine.load
        return PrefillLoad(
            total_blocks=load.total_blocks,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
            queued_sequences=load.queued_sequences,
            running_sequences=load.running_sequences,
            queued_tokens=load.queued_tokens,
        )

    def _on_command(self, command: PrefillCommand, stream: Stream) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(command.submit, stream)
            case "deliver":
                self._deliver(command.deliver)
            case "cancel":
                self.tasks.cancel(command.cancel.request_id, command.cancel.reason)

    def _submit(self, submit: PrefillSubmit, stream: Stream) -> None:
        request_id = submit.request.request_id
        refusal = self._refusal()
        if refusal is not None:
            stream.send(PrefillEvent(request_id=request_id, failed=to_stream_error(refusal)))
            return
        flow = PromptFlow(submit, self._around, stream.send)
        stream.start(request_id, self._run(request_id, flow))

    async def _run(self, request_id: str, flow: PromptFlow) -> None:
        self._flows[request_id] = flow
        try:
            await flow.run()
        finally:
            del self._flows[request_id]

    def _deliver(self, target: PrefillDeliver) -> None:
        flow = self._flows.get(target.request_id)
        if flow is not None:  # else it has just ended
            flow.deliver_to(target)

    def _refusal(self) -> FathomError | None:
        if self.tasks.is_draining:
            return NoReplica("this prefill replica is shutting down")
        if len(self.tasks) >= self._max_prompts:
            load = self._around.engine.load
            seconds = load.queued_tokens / load.tokens_per_second if load.tokens_per_second else 1.0
            return Overloaded(f"{self._max_prompts} prompts are waiting here", retry_after=max(1.0, seconds))
        return None


@dataclass(frozen=True, slots=True)
class Replica:
    """A prefill replica without its process."""

    servicer: Servicer
    engine: PrefillEngine
    writer: BlockWriter | None
    states: States


def assemble(
    executor: Executor,
    thread: EngineThread,
    metrics: PrefillMetrics,
    *,
    chunk_tokens: int,
    channel: Callable[[str], grpc.aio.Channel],
    kvstore: Stores | None = None,
    windows: WindowWorker | None = None,
    grammars: GrammarFactory | None = None,
    deliver_seconds: float = DELIVER_SECONDS,
) -> Replica:
    """Put engine and servicer together around a loaded model; the thread drives the engine from here on.

    windows: the host's saved window states; None keeps and finds none.  grammars: None obeys none.
    """
    writer = None
    if kvstore is not None:
        writer = BlockWriter(
            kvstore, fingerprint=executor.fingerprint, max_bytes=WRITEBACK_BYTES, on_drop=metrics.count_write_drop
        )
    states = States(executor, windows)
    engine = PrefillEngine(
        executor,
        BlockPool(executor.num_blocks, executor.layout.block_tokens),
        chunk_tokens=chunk_tokens,
        tell=thread.tell,
        writeback=Writeback(executor.fetch_block, executor.layout.block_bytes, writer),
        states=states,
        on_step=metrics.step_seconds.observe,
    )
    thread.drive(engine.turn)
    limits = limits_of(executor, obeys_grammars=grammars is not None)
    around = Surroundings(
        engine=engine,
        thread=thread,
        limits=limits,
        states=states,
        grammars=grammars,
        embeddings=EmbeddingsSource(channel, EmbeddingsRoom(), limits.embedding_bytes),
        channel=channel,
        kvstore=kvstore,
        counters=metrics,
        deliver_seconds=deliver_seconds,
    )
    return Replica(Servicer(around), engine, writer, states)


async def build(service: Service) -> None:
    """Load the model in the engine thread, then serve it."""
    settings = service.settings
    assert isinstance(settings, PrefillSettings)
    thread = EngineThread("prefill engine")
    thread.start()
    service.on_stop(thread.stop)
    service.spawn(thread.run(), "prefill engine")
    executor = await thread.call(load_model, settings, service.progress)
    windows = await asyncio.to_thread(open_worker, executor, max_bytes=states_bytes(settings.kv_bytes))
    if windows is not None:
        service.on_stop(windows.close)
        service.metrics.register(WindowStoreCollector(PREFIX, windows.store.counts))
    grammars = open_grammars(executor, settings.model)
    replica = assemble(
        executor,
        thread,
        PrefillMetrics(service.metrics),
        windows=windows,
        grammars=grammars,
        chunk_tokens=settings.chunk_tokens,
        channel=service.channel,
        kvstore=Stores.of(settings.kvstore_address, lambda address: service.channel(address, "kvstore")),
    )
    service.on_drain(replica.servicer.tasks.drain)  # a prompt ends when decode has its KV, or its handoff's time is up
    service.on_drain(aborts_said)
    if replica.writer is not None:
        service.spawn(replica.writer.run(), "writeback")
        service.on_drain(replica.writer.flush)
    engine = replica.engine
    service.metrics.register(LoadCollector(lambda: engine.load))
    service.spawn(report_load(service.bus.publish_load, lambda: _report(service, engine.load)), "load reports")
    service.advertise(model=card_of(executor, settings.model), total_blocks=engine.load.total_blocks)
    add_PrefillServicer_to_server(replica.servicer, service.server)


def _report(service: Service, load: Load) -> LoadReport:
    return LoadReport(
        service=service.name,
        replica=service.replica,
        boot_id=service.boot_id,
        running_sequences=load.running_sequences,
        queued_sequences=load.queued_sequences,
        queued_tokens=load.queued_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        tokens_per_second=load.tokens_per_second,
    )
