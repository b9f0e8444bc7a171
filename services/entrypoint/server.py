"""Translate between the wire and the requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from proto.common_pb2 import TokenEvent, TokenFrame
from proto.entrypoint_pb2 import GenerateCommand, ListModelsReply, ListModelsRequest
from proto.entrypoint_pb2_grpc import EntrypointServicer, add_EntrypointServicer_to_server
from services.chassis.frames import FrameSender, serve_shared
from services.chassis.registry import ReplicaTable
from services.chassis.service import Service
from services.entrypoint import fleet
from services.entrypoint.config import EntrypointSettings
from services.entrypoint.metrics import EntrypointMetrics
from services.entrypoint.peers import Peers
from services.entrypoint.requests import Requests

SWEEP_SECONDS = 5.0


class Entrypoint(EntrypointServicer):
    """The conductor's gRPC face."""

    def __init__(self, requests: Requests, prefill: ReplicaTable, decode: ReplicaTable) -> None:
        self._requests = requests
        self._prefill = prefill
        self._decode = decode
        self._senders: set[FrameSender[TokenEvent, TokenFrame]] = set()

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[TokenFrame]:  # noqa: ARG002 - gRPC's signature
        """Carry one recipe's requests. Whatever ends the stream, a break included, cancels those still running."""
        sender: FrameSender[TokenEvent, TokenFrame] = FrameSender(_frame)
        self._senders.add(sender)

        async def on_command(command: GenerateCommand) -> None:
            if command.HasField("submit"):
                self._requests.start(command.submit, sender.put)
            elif command.HasField("cancel"):
                self._requests.cancel(command.cancel.request_id, command.cancel.reason)

        try:
            served = cast("AsyncGenerator[TokenFrame]", serve_shared(request_iterator, sender, on_command))
            async with aclosing(served) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._senders.discard(sender)
            self._requests.cancel_all(sender.put)

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsReply:  # noqa: ARG002 - gRPC's signature
        """List what can be served right now."""
        return ListModelsReply(models=fleet.models(self._prefill.snapshot(), self._decode.snapshot()))

    async def drain(self) -> None:
        """Finish what is running, then end the recipes' streams: they would never end by themselves."""
        await self._requests.drain()
        for sender in self._senders:
            sender.close()


def _frame(events: Sequence[TokenEvent], sequence: int) -> TokenFrame:
    return TokenFrame(events=events, sequence=sequence)


async def build(service: Service) -> None:
    """Wire one entrypoint: tables of both kinds of replica, peers, requests."""
    settings: EntrypointSettings = service.settings
    metrics = EntrypointMetrics(service.metrics)
    prefill, decode = service.registry.watch("prefill"), service.registry.watch("decode")
    peers = Peers(settings, service.channel, metrics, boot_id=service.boot_id)
    requests = Requests(
        settings, peers, metrics, lambda model: fleet.choose(model, prefill.snapshot(), decode.snapshot())
    )
    entrypoint = Entrypoint(requests, prefill, decode)
    add_EntrypointServicer_to_server(entrypoint, service.server)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await peers.drop_gone({replica.boot_id for replica in (*prefill.snapshot(), *decode.snapshot())})

    service.spawn(sweep(), "sweep peers")
    service.on_drain(entrypoint.drain)
    service.on_stop(peers.close)
