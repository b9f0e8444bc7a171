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
    FinishReason,
    PositionLogprobs,
    Request,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from proto.decode_pb2 import DecodeSubmit
from services.chassis import names
from services.chassis.block_keys import KeyChain
from services.chassis.errors import BlocksLost, DeadlinePassed, InternalError, to_stream_error
from services.chassis.telemetry import bind_request, span
from services.decode.admission import Limits, answer_tokens, check_request
from services.decode.sampling import sampling_params
from services.decode.sequence import DecodeSequence, Ending, Grown

if TYPE_CHECKING:
    from kernels.batch import Sampled
    from services.chassis.engine_thread import EngineThread
    from services.decode.engine import DecodeEngine
    from services.decode.intake import Intake, Landed

_REASONS = {Ending.STOP: FINISH_REASON_STOP, Ending.LENGTH: FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all answers on this replica share."""

    engine: DecodeEngine
    thread: EngineThread
    intake: Intake
    limits: Limits


class AnswerFlow:
    """One request on this replica. `send` gets its events, the last one before `run` returns."""

    def __init__(self, submit: DecodeSubmit, around: Surroundings, send: Callable[[TokenEvent], None]) -> None:
        self._request: Request = submit.request
        self._around = around
        self._send = send
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
            landed = await around.intake.landed(self._request.request_id)
        finally:
            around.intake.abort_request(self._request.request_id)
        try:
            await self._answer(self._sequence(landed), landed.epoch)
        finally:
            around.thread.post(around.engine.rooms.release, landed.epoch)

    async def _answer(self, sequence: DecodeSequence, epoch: int) -> None:
        if len(sequence.token_ids) >= sequence.last_tokens:  # this pool holds less than the one prefill knew
            self._emit(finish_reason=FINISH_REASON_LENGTH)
            return
        around = self._around
        try:
            await around.thread.call(around.engine.start, sequence, epoch)
            await self._ended
        finally:
            around.thread.post(around.engine.release, sequence)

    def _sequence(self, landed: Landed) -> DecodeSequence:
        """Make the engine's sequence of the request and what prefill handed over."""
        request, limits = self._request, self._around.limits
        prompt = list(request.prompt_token_ids)
        if landed.kv_tokens != len(prompt):
            raise BlocksLost(f"KV of {landed.kv_tokens} tokens was handed over for a prompt of {len(prompt)}")
        chain = KeyChain(request.key_root, block_tokens=limits.block_tokens)
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
        )

    def _on_grown(self, grown: Grown) -> None:
        if grown.ending is Ending.FAILED:
            if not self._ended.done():
                self._ended.set_exception(InternalError(f"no token could be sampled: {grown.sampled.problem}"))
            return
        self._usage.completion_tokens = grown.num_answer_tokens
        reason = _REASONS[grown.ending] if grown.ending is not None else FINISH_REASON_UNSPECIFIED
        self._emit(token_ids=[grown.sampled.token_id], logprobs=_logprobs(grown.sampled), finish_reason=reason)
        if grown.ending is not None and not self._ended.done():
            self._ended.set_result(None)

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
