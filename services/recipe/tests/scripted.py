"""What answers the recipe in its tests? A real gRPC entrypoint that plays scripts instead of asking engines."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from proto import entrypoint_pb2_grpc
from proto.common_pb2 import (
    FinishReason,
    ModelCard,
    PositionLogprobs,
    Request,
    StreamError,
    TokenEvent,
    TokenFrame,
    TokenLogprob,
    Usage,
)
from proto.entrypoint_pb2 import GenerateCommand, ListModelsReply, ListModelsRequest
from services.chassis.frames import FrameSender, serve_shared

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH


@dataclass(frozen=True)
class Step:
    """One event: its tokens, or an error; `after` seconds of waiting come first."""

    token_ids: Sequence[int] = ()
    finish: int = 0
    error: StreamError | None = None
    after: float = 0.0


Script = Callable[[Request], Iterable[Step]]


@dataclass
class ScriptedEntrypoint(entrypoint_pb2_grpc.EntrypointServicer):
    """Plays `script` for every request; remembers what it was told."""

    script: Script
    models: list[ModelCard] = field(default_factory=lambda: [ModelCard(name="tiny", context_tokens=512)])
    cached_tokens: int = 0
    submitted: list[Request] = field(default_factory=list)
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    break_streams: asyncio.Event = field(default_factory=asyncio.Event)

    async def ListModels(self, _request: ListModelsRequest, _context: Any) -> ListModelsReply:
        return ListModelsReply(models=self.models)

    async def Generate(self, commands: Any, _context: Any) -> AsyncIterator[TokenFrame]:
        sender: FrameSender[TokenEvent, TokenFrame] = FrameSender(
            lambda events, number: TokenFrame(events=events, sequence=number), heartbeat_seconds=0.2
        )

        async def on_command(command: GenerateCommand) -> None:
            if command.HasField("submit"):
                self.submitted.append(command.submit)
                self.running[command.submit.request_id] = asyncio.create_task(self._play(command.submit, sender))
            elif command.HasField("cancel"):
                self.cancelled.append((command.cancel.request_id, command.cancel.reason))
                self.running[command.cancel.request_id].cancel()

        async def break_when_told() -> None:
            await self.break_streams.wait()
            sender.close()

        breaker = asyncio.create_task(break_when_told())
        try:
            async for frame in serve_shared(commands, sender, on_command):
                yield frame
        finally:
            breaker.cancel()
            for task in self.running.values():
                task.cancel()

    async def _play(self, request: Request, sender: FrameSender[TokenEvent, TokenFrame]) -> None:
        num_tokens = 0
        for step in self.script(request):
            # Even without a pause every event goes out alone: what the recipe makes of it must not hang on luck.
            await asyncio.sleep(step.after)
            event = TokenEvent(request_id=request.request_id, token_ids=step.token_ids)
            if request.sampling.HasField("num_logprobs"):
                event.logprobs.extend(_scores(token_id, request.sampling.num_logprobs) for token_id in step.token_ids)
            if num_tokens == 0 and request.HasField("num_prompt_logprobs"):
                known = list(request.prompt_token_ids)[1:]
                event.prompt_logprobs.extend(_scores(token_id, request.num_prompt_logprobs) for token_id in known)
            if step.error is not None:
                event.error.CopyFrom(step.error)
                event.finish_reason = FinishReason.FINISH_REASON_ERROR
            else:
                event.finish_reason = FinishReason.ValueType(step.finish)
            if num_tokens == 0 or step.finish:
                prompt = len(request.prompt_token_ids)
                num_tokens += len(step.token_ids)
                usage = Usage(prompt_tokens=prompt, cached_tokens=self.cached_tokens, completion_tokens=num_tokens)
                event.usage.CopyFrom(usage)
            sender.put(event)


def _scores(token_id: int, num_top: int) -> PositionLogprobs:
    top = [TokenLogprob(token_id=(token_id + i) % 256, logprob=-0.5 - i) for i in range(num_top)]
    return PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.5), top=top)


def saying(token_ids: Sequence[int], *, per_step: int = 1, eos: int | None = None, after: float = 0.0) -> Script:
    """Return a script that says these tokens, ended by `eos` or, without, by max_tokens or their own end (LENGTH)."""

    def script(request: Request) -> Iterable[Step]:
        said = list(token_ids)[: request.stop.max_tokens]
        ends = STOP if eos is not None and len(said) < request.stop.max_tokens else LENGTH
        if ends == STOP:
            assert eos is not None
            said.append(eos)
        parts = [said[i : i + per_step] for i in range(0, len(said), per_step)]
        for i, part in enumerate(parts):
            yield Step(part, finish=ends if i == len(parts) - 1 else 0, after=after)

    return script
