"""May this request enter, and is it one that the model can answer?

The recipe has checked all this already; here it is checked again because an engine trusts what reaches it, and an
entrypoint is reached by more than one kind of caller.
"""

from __future__ import annotations

import hashlib
import math

from proto.common_pb2 import ModelCard, Request, RetentionClass
from services.chassis.block_keys import key_root
from services.chassis.errors import BadImage, InvalidRequest, Overloaded, PromptTooLong
from services.chassis.images import MAX_ENCODED_BYTES

DEFAULT_SECONDS = 600.0
"""Deadline of a request that brings none."""

HASH_BYTES = 32

RETRY_SECONDS = 1.0
"""When a refused caller may try again: with hundreds of requests in flight, some end every second."""


def admit(num_in_flight: int, *, max_requests: int) -> None:
    """Raise Overloaded when one more request would be too many."""
    if num_in_flight >= max_requests:
        raise Overloaded(f"{num_in_flight} requests are in flight, the limit", retry_after=RETRY_SECONDS)


def check(request: Request, card: ModelCard) -> None:
    """Raise InvalidRequest, or a kind of it, for what this model can never answer."""
    prompt_tokens = len(request.prompt_token_ids)
    if not request.request_id:
        raise InvalidRequest("request_id is empty", field="request_id")
    if not prompt_tokens:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if prompt_tokens >= card.context_tokens:
        raise PromptTooLong(
            f"prompt has {prompt_tokens} tokens; this model takes at most {card.context_tokens - 1} and one of answer",
            field="prompt",
        )
    if not math.isfinite(request.deadline_unix_seconds):  # in the event loop's timers it would hold up everybody's
        raise InvalidRequest(
            f"deadline_unix_seconds is {request.deadline_unix_seconds}; it must be a finite number",
            field="deadline_unix_seconds",
        )
    if not request.stop.max_tokens:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if request.images and not card.takes_images:
        raise BadImage(f"model {card.name!r} takes no images: send text only", field="messages")
    if request.retention not in RetentionClass.values():  # proto3 lets unknown numbers through
        raise InvalidRequest(
            f"retention class {request.retention} is not one that blocks are kept by", field="retention"
        )
    text = _text_around_images(request, card.vocab_tokens)
    _check_token_ids(request, text, card.vocab_tokens)


def _text_around_images(request: Request, vocab_tokens: int) -> list[int]:
    """Return the prompt's tokens outside its images. Raises BadImage for an image that is not what its place says."""
    prompt = list(request.prompt_token_ids)
    text: list[int] = []
    end = 0
    for image in request.images:
        before, start, end = end, image.position, image.position + image.num_tokens
        if not before <= start < end <= len(prompt):
            raise BadImage(f"an image at tokens {start} to {end} is not in the prompt, or in another", field="messages")
        # The first place of an image has an id of its own, so that two neighbours are still two.
        if prompt[start] != vocab_tokens + 2 or prompt[start + 1 : end].count(vocab_tokens + 1) != end - start - 1:
            raise BadImage(f"tokens {start} to {end} are not those of an image", field="messages")
        if len(image.content_hash) != HASH_BYTES or not 0 < len(image.data) <= MAX_ENCODED_BYTES:
            raise BadImage(f"an image comes with its SHA-256 and at most {MAX_ENCODED_BYTES} bytes", field="messages")
        text += prompt[before:start]
    return text + prompt[end:]


def _check_token_ids(request: Request, text: list[int], vocab_tokens: int) -> None:
    stops = request.stop.stop_token_ids
    biased = [bias.token_id for bias in request.sampling.logit_bias]
    for field, token_ids in (("prompt", text), ("stop", stops), ("logit_bias", biased)):
        largest = max(token_ids, default=0)
        if largest >= vocab_tokens:
            raise InvalidRequest(f"token id {largest} is outside the vocabulary of {vocab_tokens}", field=field)


def admitted(request: Request, card: ModelCard, *, cluster_key: bytes, now: float) -> Request:
    """Return the request as prefill and decode see it: with deadline, fingerprint and key root.

    cluster_key: 32 bytes, used here and sent nowhere. now: Unix time in seconds.
    """
    full = Request()
    full.CopyFrom(request)
    for image in full.images:  # ours to fill in
        image.ClearField("vision_address")
        image.ClearField("vision_fingerprint")
    full.deadline_unix_seconds = request.deadline_unix_seconds or now + DEFAULT_SECONDS
    full.fingerprint = card.fingerprint
    full.key_root = key_root(cluster_key, card.fingerprint, tenant_salt(request.tenant))
    return full


def tenant_salt(tenant: str) -> bytes:
    """Return what keeps one tenant's blocks apart from another's; empty for the anonymous tenant."""
    return hashlib.sha256(tenant.encode()).digest() if tenant else b""
