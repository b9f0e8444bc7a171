"""What answers the recipe in its benchmark? A gRPC entrypoint in a process of its own that says prompts back.

Requests for one token are answered at once. All others get STEP_TOKENS tokens of their own prompt, over and over, in
every step, and one frame carries a step of all of them, as decode replicas send it.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from proto.common_pb2 import FinishReason, ModelCard, Request, TokenEvent, TokenFrame, Usage
from proto.entrypoint_pb2 import GenerateCommand, ListModelsReply, ListModelsRequest
from proto.entrypoint_pb2_grpc import EntrypointServicer, add_EntrypointServicer_to_server
from services.chassis import testing
from services.chassis.frames import FrameSender, serve_shared

STEP_TOKENS = 4
LEAST_ID = 300
"""Control tokens and single bytes are below."""


@dataclass
class Spoken:
    """One request being answered."""

    request: Request
    words: Iterator[int]
    num_left: int


@dataclass
class EchoEntrypoint(EntrypointServicer):
    """Says every prompt back, a step every `step_seconds`."""

    card: ModelCard
    step_seconds: float
    _spoken: dict[str, Spoken] = field(default_factory=dict)

    async def ListModels(self, _request: ListModelsRequest, _context: Any) -> ListModelsReply:
        return ListModelsReply(models=[self.card])

    async def Generate(self, commands: Any, _context: Any) -> AsyncIterator[TokenFrame]:
        sender: FrameSender[TokenEvent, TokenFrame] = FrameSender(
            lambda events, number: TokenFrame(events=events, sequence=number)
        )

        async def on_command(command: GenerateCommand) -> None:
            if command.HasField("cancel"):
                self._spoken.pop(command.cancel.request_id, None)
            elif command.HasField("submit"):
                self._submit(command.submit, sender)

        ticking = asyncio.create_task(self._tick(sender))
        try:
            async for frame in serve_shared(commands, sender, on_command):
                yield frame
        finally:
            ticking.cancel()

    def _submit(self, request: Request, sender: "FrameSender[TokenEvent, TokenFrame]") -> None:
        words = itertools.cycle([i for i in request.prompt_token_ids if i >= LEAST_ID] or [LEAST_ID])
        spoken = Spoken(request, words, request.stop.max_tokens)
        if request.stop.max_tokens == 1:
            sender.put(_step(spoken))
        else:
            self._spoken[request.request_id] = spoken

    async def _tick(self, sender: "FrameSender[TokenEvent, TokenFrame]") -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.step_seconds, loop.time())
            await asyncio.sleep(due - loop.time())
            for request_id, spoken in tuple(self._spoken.items()):
                sender.put(_step(spoken))
                if not spoken.num_left:
                    del self._spoken[request_id]


def _step(spoken: Spoken) -> TokenEvent:
    is_first = spoken.num_left == spoken.request.stop.max_tokens
    ids = list(itertools.islice(spoken.words, min(STEP_TOKENS, spoken.num_left)))
    spoken.num_left -= len(ids)
    event = TokenEvent(request_id=spoken.request.request_id, token_ids=ids)
    if not spoken.num_left:
        event.finish_reason = FinishReason.FINISH_REASON_LENGTH
    if is_first or not spoken.num_left:
        said = spoken.request.stop.max_tokens - spoken.num_left
        prompt = len(spoken.request.prompt_token_ids)
        event.usage.CopyFrom(Usage(prompt_tokens=prompt, completion_tokens=said))
    return event


async def _serve(name: str, context_tokens: int, step_seconds: float) -> None:
    servicer = EchoEntrypoint(ModelCard(name=name, context_tokens=context_tokens), step_seconds)
    async with testing.serve(lambda server: add_EntrypointServicer_to_server(servicer, server)) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
