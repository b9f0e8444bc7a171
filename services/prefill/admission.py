"""May this request run here at all?"""

from __future__ import annotations

from dataclasses import dataclass

from proto.common_pb2 import Request
from services.chassis.errors import BadImage, BadSampling, BadSchema, BlocksLost, InvalidRequest, PromptTooLong


@dataclass(frozen=True, slots=True)
class Limits:
    """What this replica's model and pool can hold."""

    fingerprint: bytes
    vocab_tokens: int
    context_tokens: int
    """Longest prompt plus answer: the model's, or the pool's if that is smaller."""
    block_tokens: int
    block_bytes: int


def answer_tokens(request: Request, limits: Limits) -> int:
    """Return how many tokens the answer can have at most."""
    return min(request.stop.max_tokens, limits.context_tokens - len(request.prompt_token_ids))


def check_request(request: Request, limits: Limits) -> None:
    """Raise what is wrong with a request. An engine fed with such a request would fail for everybody in the batch."""
    if request.fingerprint != limits.fingerprint:
        raise BlocksLost("the request was admitted for another model fingerprint than this replica's")
    if request.HasField("grammar"):
        raise BadSchema("this engine cannot obey a grammar yet", field="response_format")
    if request.images:
        raise BadImage("this model takes no images", field="messages")
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
    if len(prompt) >= limits.context_tokens:
        raise PromptTooLong(
            f"prompt has {len(prompt)} tokens; with one token of answer it may have {limits.context_tokens - 1}",
            field="prompt",
        )
    if max(prompt) >= limits.vocab_tokens:
        raise InvalidRequest(f"token ids must be below {limits.vocab_tokens}", field="prompt")
    if request.stop.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if any(bias.token_id >= limits.vocab_tokens for bias in request.sampling.logit_bias):
        raise BadSampling(f"logit_bias takes token ids below {limits.vocab_tokens}", field="logit_bias")
