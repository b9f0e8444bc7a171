"""What does prefill tell about the first token, and is it already the whole answer?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.batch import Scored
from proto.common_pb2 import (
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
from proto.prefill_pb2 import FirstToken

if TYPE_CHECKING:
    from kernels.batch import Sampled
    from services.prefill.prompt import FirstTokenSampled


def first_token_event(request: Request, first: FirstTokenSampled, answer_tokens: int) -> FirstToken:
    """Put the first token, its cost and, if the answer ends with it, the reason into a message."""
    token = TokenEvent(
        request_id=request.request_id,
        token_ids=[first.sampled.token_id],
        logprobs=_logprobs(first.sampled),
        finish_reason=_finish_reason(request, first.sampled.token_id, answer_tokens),
        usage=Usage(
            prompt_tokens=len(request.prompt_token_ids), cached_tokens=first.cached_tokens, completion_tokens=1
        ),
    )
    return FirstToken(
        token=token,
        cached_tokens=first.cached_tokens,
        computed_tokens=first.computed_tokens,
        queue_seconds=first.queue_seconds,
        compute_seconds=first.compute_seconds,
        prompt_logprobs=[_position(scored) for scored in first.scores],
    )


def _finish_reason(request: Request, token_id: int, answer_tokens: int) -> FinishReason.ValueType:
    if token_id in request.stop.stop_token_ids:
        return FINISH_REASON_STOP
    return FINISH_REASON_LENGTH if answer_tokens == 1 else FINISH_REASON_UNSPECIFIED


def _logprobs(sampled: Sampled) -> list[PositionLogprobs]:
    if sampled.logprob is None:
        return []
    return [_position(Scored(sampled.token_id, sampled.logprob, sampled.top))]


def _position(scored: Scored) -> PositionLogprobs:
    chosen = TokenLogprob(token_id=scored.token_id, logprob=scored.logprob)
    top = [TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in scored.top]
    return PositionLogprobs(chosen=chosen, top=top)
