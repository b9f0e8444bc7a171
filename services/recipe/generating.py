"""How is one understood request generated, whichever API it came by and however it will be told?"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from proto.common_pb2 import FinishReason, Grammar, TokenEvent
from services.chassis import telemetry
from services.recipe.choices import Choice
from services.recipe.constraint import Constraint
from services.recipe.conversation import Conversation
from services.recipe.dialect import Parser
from services.recipe.framing import sketch_of
from services.recipe.grammars import GrammarCompiler
from services.recipe.image_fetch import ImageFetcher
from services.recipe.jobs import Job, plan_jobs
from services.recipe.keys_visit import current_visit
from services.recipe.meters import Meters
from services.recipe.model_folder import ServedModel
from services.recipe.pictures import Prompt
from services.recipe.refusals import ApiError
from services.recipe.schema import AnswerRules, Sampling
from services.recipe.stream import PING_SECONDS
from services.recipe.transcript import Piece, Transcript
from services.recipe.upstream import Upstream

SHARED_PROMPT_TOKENS = 256
"""From this length on the first choice's prefill goes ahead, and the other choices find its blocks."""

Show = Callable[[Choice, Piece], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Front:
    """What all requests share."""

    model: ServedModel
    upstream: Upstream
    meters: Meters
    max_body_bytes: int
    compiler: GrammarCompiler
    fetcher: ImageFetcher
    ping_seconds: float = PING_SECONDS

    async def grammar(self, constraint: Constraint, conversation: Conversation) -> Grammar | None:
        """Return what the engines hold an answer to, None for nothing; raise a 400 for what cannot be enforced."""
        sketch = sketch_of(constraint, conversation, self.model.dialect.framing)
        return None if sketch is None else await self.compiler.compile(sketch)

    async def prompt(self, conversation: Conversation) -> Prompt:
        """Return a conversation's prompt, its pictures fetched; raise a 400 for what cannot be one."""
        fetched = await self.fetcher.fetched(conversation)
        return await self.model.encoder.chat(fetched, context_tokens=self.context_tokens)

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus answer that both the model and the engines' memory allow."""
        card = self.upstream.card
        limit = self.model.context_tokens
        return min(limit, card.context_tokens) if card is not None and card.context_tokens else limit


class Replies(Protocol):
    """Tells the answer to one request in one API's words. All frames together are its stream."""

    @property
    def id(self) -> str:
        """The answer's own id."""

    def opening(self, choice: Choice) -> bytes:
        """Return the frames before a choice's first piece."""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """Return the frames that show a piece, the finishing one included."""

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the frames after all choices have finished."""

    def failing(self, error: ApiError, shown_id: str) -> bytes:
        """Return the frames that end a stream that has begun and cannot go on."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the body of an answer that is not streamed; `pieces` of the choices hold what they say."""


@dataclass(frozen=True, slots=True)
class Understood:
    """A valid request with its prompts as ids, how to read what the model says, and the words to tell it in.

    parser: makes one for each choice.  max_calls: most tool calls of one choice; None: any number.
    grammar: None lets the answer be anything.  num_prompt_logprobs: alternatives to every token of the prompt, None
    asks for no logprobs of it.
    """

    sampling: Sampling
    rules: AnswerRules
    prompts: Sequence[Prompt]
    parser: Callable[[], Parser]
    replies: Replies
    max_calls: int | None = None
    grammar: Grammar | None = None
    num_prompt_logprobs: int | None = None


class Generating:
    """One request's choices, from submission to their ends.

    started: when the request arrived, by time.perf_counter.
    operation: the API's name in metrics.  prompt_field: where its requests hold the prompt, for errors.
    Raises a 400 when a prompt and its answer do not fit the context, a 403 or 429 when the caller's key is not for it.
    """

    def __init__(
        self,
        front: Front,
        understood: Understood,
        request_id: str,
        *,
        operation: str,
        prompt_field: str,
        started: float,
    ) -> None:
        self._front = front
        self._operation = operation
        self._started = started
        self._has_answer = understood.rules.max_tokens != 0
        jobs = plan_jobs(
            request_id,
            front.model,
            understood.prompts,
            understood.sampling,
            understood.rules,
            grammar=understood.grammar,
            num_prompt_logprobs=understood.num_prompt_logprobs,
            context_tokens=front.context_tokens,
            prompt_field=prompt_field,
            traceparent=telemetry.current_traceparent(),
        )
        self._visit = current_visit()
        self._visit.begin(jobs)
        self.choices = [_choice(job, understood) for job in jobs]
        self.first_token_seconds: float | None = None

    async def run(self, show: Show) -> None:
        """Generate all choices at once, calling `show` with each piece; leaving early cancels them in the engines."""
        with self._visit.recorded(self.choices, self._operation):
            await self._run(show)

    async def _run(self, show: Show) -> None:
        if len(self.choices) == 1:
            await self._follow(self.choices[0], show, None)
            return
        gates: dict[int, asyncio.Event] = {}
        async with asyncio.TaskGroup() as group:
            for choice in self.choices:
                gate = gates.get(choice.job.prompt)
                if gate is None:
                    gate = gates[choice.job.prompt] = asyncio.Event()
                    if len(choice.job.prompt_ids) < SHARED_PROMPT_TOKENS:
                        gate.set()
                    group.create_task(self._lead(choice, show, gate))
                else:
                    group.create_task(self._after(gate, choice, show))

    async def keep(self, choice: Choice, piece: Piece) -> None:
        """Show nothing yet: for `run`, when the answer is told whole."""
        choice.pieces.append(piece)

    async def _lead(self, choice: Choice, show: Show, gate: asyncio.Event) -> None:
        try:
            await self._follow(choice, show, gate)
        finally:
            gate.set()

    async def _after(self, gate: asyncio.Event, choice: Choice, show: Show) -> None:
        await gate.wait()
        await self._follow(choice, show, None)

    async def _follow(self, choice: Choice, show: Show, gate: asyncio.Event | None) -> None:
        """Take one choice's tokens to its end: the engine's, or a stop string, of which only we know.

        gate: opened by the first token, when the prompt's blocks are there for others.
        """
        transcript = choice.transcript
        async with self._front.upstream.generate(choice.job.request) as generation:
            async for event in generation:
                if event.prompt_logprobs:
                    choice.prompt_scores = event.prompt_logprobs
                if not self._has_answer:
                    event = _without_answer(event)  # noqa: PLW2901 - the same event, less what nobody wants
                if event.token_ids:
                    self._visit.spend_output(len(event.token_ids))
                    self._see_first_token()
                    if gate is not None:
                        gate.set()
                piece = transcript.feed(event)
                if piece is not None:
                    await show(choice, piece)
                if transcript.is_cut:
                    generation.reason = "stop_string"
                    return

    def _see_first_token(self) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self._started
            self._front.meters.first_token(self._operation, self.first_token_seconds)


def _without_answer(event: TokenEvent) -> TokenEvent:
    """Return an event of a request that wants its prompt alone: engines compute a token all the same."""
    if event.HasField("error"):
        return event
    return TokenEvent(
        request_id=event.request_id,
        finish_reason=event.finish_reason and FinishReason.FINISH_REASON_LENGTH,
        usage=event.usage,
    )


def _choice(job: Job, understood: Understood) -> Choice:
    transcript = Transcript(
        understood.parser(),
        understood.rules.stops,
        has_scores=understood.sampling.num_logprobs is not None,
        max_calls=understood.max_calls,
    )
    return Choice(job, transcript)
