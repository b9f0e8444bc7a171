"""What becomes of one answer here, from submit to its last token? Runs on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proto.common_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    RETENTION_CLASS_CHAT,
    FinishReason,
    ImageRef,
    PositionLogprobs,
    Request,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from proto.decode_pb2 import DecodeSubmit
from services.chassis import names
from services.chassis.block_keys import KeyChain, image_extras
from services.chassis.embeddings import EmbeddingsFetch, EmbeddingsSource, ImageFeed
from services.chassis.errors import BadSchema, BlocksLost, DeadlinePassed, InternalError, to_stream_error
from services.chassis.kvstore_writer import Origin
from services.chassis.telemetry import bind_request, span
from services.decode.admission import Limits, answer_tokens, check_request
from services.decode.grammar import Guide, open_guide, replay_first
from services.decode.sampling import sampling_params
from services.decode.sequence import DecodeSequence, EmbeddingsWanted, Ending, Grown, StartWanted

if TYPE_CHECKING:
    from kernels.batch import Sampled
    from kernels.grammar import GrammarFactory
    from services.chassis.engine_thread import EngineThread
    from services.decode.engine import DecodeEngine
    from services.decode.intake import Intake, Landed
    from services.decode.states import States

_REASONS: dict[Ending | None, FinishReason.ValueType] = {
    Ending.STOP: FINISH_REASON_STOP,
    Ending.LENGTH: FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all answers on this replica share."""

    engine: DecodeEngine
    thread: EngineThread
    intake: Intake
    limits: Limits
    states: States
    grammars: GrammarFactory | None
    embeddings: EmbeddingsSource


class AnswerFlow:
    """One request on this replica. `send` gets its events, the last one before `run` returns."""

    def __init__(self, submit: DecodeSubmit, around: Surroundings, send: Callable[[TokenEvent], None]) -> None:
        self._request: Request = submit.request
        self._around = around
        self._send = send
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked: asyncio.Queue[StartWanted | EmbeddingsWanted] = asyncio.Queue()
        self._usage = Usage(prompt_tokens=len(submit.request.prompt_token_ids))
        self._has_reported = False

    async def run(self) -> None:
        """Serve the request; an error becomes its last event. Cancel the task to cancel the request."""
        request = self._request
        bind_request(request.request_id)
        with span("decode.run", traceparent=request.traceparent) as whole:
            whole.set_attribute(names.REQUEST_ID, request.request_id)
            try:
                async with asyncio.timeout(request.deadline_unix_seconds - time.time()):
                    await self._serve()
            except TimeoutError:
                self._fail(DeadlinePassed("the request's deadline passed during decode"))
            except Exception as error:  # noqa: BLE001 - mapped to its kind; a stranger is logged there
                self._fail(error)
            finally:
                whole.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, self._usage.completion_tokens)

    async def _serve(self) -> None:
        around = self._around
        try:
            check_request(self._request, around.limits)
            guide = await self._guide()  # while prefill computes
            landed = await around.intake.landed(self._request.request_id)
        except BaseException:  # what comes later for it must not wait here for nobody
            around.intake.refuse_request(self._request.request_id)
            raise
        around.intake.abort_request(self._request.request_id)
        try:
            await self._answer(self._sequence(landed, guide), landed.epoch)
        finally:
            around.thread.post(around.engine.rooms.release, landed.epoch)

    async def _answer(self, sequence: DecodeSequence, epoch: int) -> None:
        if sequence.guide is not None and sequence.guide.matcher.is_finished:  # by prefill's token
            self._emit(finish_reason=FINISH_REASON_STOP)
            return
        if len(sequence.token_ids) >= sequence.last_tokens:  # this pool holds less than the one prefill knew
            self._emit(finish_reason=FINISH_REASON_LENGTH)
            return
        around = self._around
        recomputing = asyncio.create_task(self._help_recompute(sequence), name="help recompute")
        try:
            await around.thread.call(around.engine.start, sequence, epoch)
            await self._ended
        finally:
            recomputing.cancel()
            around.thread.post(around.engine.release, sequence)

    async def _help_recompute(self, sequence: DecodeSequence) -> None:
        """Bring what a preempted sequence needs: a window state of this host, and the embeddings of its images."""
        around = self._around

        def deliver(image: ImageRef, embeddings: memoryview) -> None:
            around.thread.post(around.engine.embedded, sequence, image, embeddings)

        fetch = EmbeddingsFetch(self._request, around.embeddings, deliver=deliver, on_error=self._end)
        try:
            while True:
                match await self._asked.get():
                    case EmbeddingsWanted(image):
                        fetch.want(image)
                    case StartWanted(attempt, found, num_tokens):
                        hit, state = await around.states.find_start(found, num_tokens)
                        around.thread.post(around.engine.begin, sequence, attempt, hit, state)
        except Exception as error:  # noqa: BLE001 - it would leave the sequence waiting for ever
            self._end(error)
        finally:
            fetch.close()

    async def _guide(self) -> Guide | None:
        if not self._request.HasField("grammar"):
            return None
        assert self._around.grammars is not None, "admission refuses grammars where none are obeyed"
        return await open_guide(self._around.grammars, self._request.grammar)

    def _sequence(self, landed: Landed, guide: Guide | None) -> DecodeSequence:
        """Make the engine's sequence of the request and what prefill handed over."""
        request, limits = self._request, self._around.limits
        prompt = list(request.prompt_token_ids)
        if landed.kv_tokens != len(prompt):
            raise BlocksLost(f"KV of {landed.kv_tokens} tokens was handed over for a prompt of {len(prompt)}")
        if guide is not None:
            replay_first(guide, landed.first_token_id)
        extra = image_extras(request.images, block_tokens=limits.block_tokens)
        chain = KeyChain(request.key_root, block_tokens=limits.block_tokens, extra=extra)
        keys = list(chain.extend([*prompt, landed.first_token_id]))
        self._usage.cached_tokens = landed.cached_tokens
        self._usage.completion_tokens = 1
        return DecodeSequence(
            token_ids=[*prompt, landed.first_token_id],
            num_prompt_tokens=len(prompt),
            last_tokens=len(prompt) + answer_tokens(request, limits),
            stop_token_ids=frozenset(request.stop.stop_token_ids),
            sampling=sampling_params(request.sampling),
            priority=request.priority,
            keys=keys,
            next_key=chain.append,
            listener=self._on_grown,
            ask=self._asked.put_nowait,
            guide=guide,
            images=ImageFeed(request.images),
            origin=Origin(request.tenant, request.retention or RETENTION_CLASS_CHAT),
        )

    def _on_grown(self, grown: Grown) -> None:
        if grown.ending is Ending.UNGUIDED:
            self._end(BadSchema("the grammar has become too complex to obey", field="response_format"))
            return
        if grown.ending is Ending.FAILED:
            self._end(InternalError(f"no token could be sampled: {grown.sampled.problem}"))
            return
        self._usage.completion_tokens = grown.num_answer_tokens
        reason = _REASONS.get(grown.ending, FINISH_REASON_UNSPECIFIED)
        self._emit(token_ids=[grown.sampled.token_id], logprobs=_logprobs(grown.sampled), finish_reason=reason)
        if grown.ending is Ending.WHOLE:  # its last token is a part of the text, unlike a stop token
            self._emit(finish_reason=FINISH_REASON_STOP)
        if grown.ending is not None and not self._ended.done():
            self._ended.set_result(None)

    def _end(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _fail(self, error: Exception) -> None:
        self._emit(finish_reason=FINISH_REASON_ERROR, error=to_stream_error(error))

    def _emit(self, *, finish_reason: FinishReason.ValueType, **fields: Any) -> None:  # fields of TokenEvent
        is_edge = not self._has_reported or finish_reason != FINISH_REASON_UNSPECIFIED
        self._has_reported = True
        self._send(
            TokenEvent(
                request_id=self._request.request_id,
                finish_reason=finish_reason,
                usage=self._usage if is_edge else None,
                **fields,
            )
        )


def _logprobs(sampled: Sampled) -> list[PositionLogprobs]:
    if sampled.logprob is None:
        return []
    chosen = TokenLogprob(token_id=sampled.token_id, logprob=sampled.logprob)
    top = [TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in sampled.top]
    return [PositionLogprobs(chosen=chosen, top=top)]
