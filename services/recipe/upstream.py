"""How do requests reach the entrypoint, and tokens come back? One shared stream for the whole process."""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from grpc import aio

from proto.common_pb2 import Cancel, Heartbeat, ModelCard, Request, TokenEvent, TokenFrame
from proto.entrypoint_pb2 import GenerateCommand, ListModelsRequest
from proto.entrypoint_pb2_grpc import EntrypointStub
from services.chassis import errors, telemetry
from services.chassis.streams import PeerStream, Subscription

ASK_SECONDS = 1.0
REFRESH_SECONDS = 10.0
RETRY_SECONDS = 0.5


class Upstream:
    """The entrypoint, as the recipe sees it. `model_name` is the one model this recipe can spell."""

    def __init__(self, channel: aio.Channel, boot_id: str, model_name: str) -> None:
        self._stub = EntrypointStub(channel)
        self._model_name = model_name
        self._stream: PeerStream[GenerateCommand, TokenFrame] = PeerStream(
            call=self._stub.Generate,
            heartbeat=lambda: GenerateCommand(heartbeat=Heartbeat(boot_id=boot_id)),
            events=_events,
            peer="entrypoint",
        )
        self.card: ModelCard | None = None
        """The model as its replicas last announced it; None before they did."""

    def generate(self, request: Request) -> "Generation":
        """Return the request's events; it is submitted on entering the context and cancelled on leaving it early."""
        return Generation(self._stream, request)

    async def find_model(self) -> ModelCard | None:
        """Ask whether the model is served right now; raise PeerLost when the entrypoint cannot be reached."""
        reply = await self._stub.ListModels(ListModelsRequest(), timeout=ASK_SECONDS)
        card = next((card for card in reply.models if card.name == self._model_name), None)
        self.card = card or self.card
        return card

    async def follow_model(self) -> None:
        """Keep `card` fresh, for ever: an engine's context may be shorter than the model's own."""
        while True:
            try:
                found = await self.find_model()
            except errors.FathomError as exc:
                found = None
                telemetry.log.debug("recipe.model.unknown", reason=exc.message)
            await asyncio.sleep(REFRESH_SECONDS if found else RETRY_SECONDS)

    async def close(self) -> None:
        """End the stream; requests still running get PeerLost."""
        await self._stream.close()


class Generation:
    """One request on its way: async-iterate its TokenEvents inside `async with`.

    Leaving before the event with a finish reason sends Cancel, with `reason` for the logs, or "disconnect" when the
    task was cancelled.
    """

    def __init__(self, stream: PeerStream[GenerateCommand, TokenFrame], request: Request) -> None:
        self._stream = stream
        self._request = request
        self._subscription: Subscription | None = None
        self._is_over = False
        self.reason = "error"

    async def __aenter__(self) -> Self:
        self._subscription = await self._stream.open_request(self._request.request_id)
        try:
            await self._stream.send(GenerateCommand(submit=self._request))
        except errors.FathomError:
            self._subscription.close()
            raise
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        assert self._subscription is not None
        if self._is_over:
            raise StopAsyncIteration
        event: TokenEvent = await self._subscription.__anext__()
        self._is_over = bool(event.finish_reason)
        return event

    async def __aexit__(
        self, _kind: type[BaseException] | None, exc: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._subscription is not None
        self._subscription.close()
        if self._is_over:
            return
        reason = "disconnect" if isinstance(exc, asyncio.CancelledError) else self.reason
        cancel = Cancel(request_id=self._request.request_id, reason=reason)
        try:
            await self._stream.send(GenerateCommand(cancel=cancel))
        except errors.FathomError as unsent:
            # The entrypoint is gone, and its end of the request with it.
            telemetry.log.debug("recipe.cancel.unsent", reason=reason, because=unsent.message)


def _events(frame: TokenFrame) -> Iterable[tuple[str, TokenEvent]]:
    return ((event.request_id, event) for event in frame.events)
