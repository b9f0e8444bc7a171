"""May this request run here at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proto.common_pb2 import Grammar, ImageRef, Request
from services.chassis.errors import BadImage, BadSampling, BadSchema, BlocksLost, InvalidRequest, PromptTooLong

HASH_BYTES = 32
MAX_GRAMMAR_BYTES = 1 << 20
MAX_PROMPT_LOGPROBS = 20
MAX_SCORES = 1 << 16
"""Logprobs of one prompt, chosen and alternative ones: about 800 KB of the first token's message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this replica's model and pool can hold."""

    fingerprint: bytes
    vocab_tokens: int
    context_tokens: int
    """Longest prompt plus answer: the model's, or the pool's if that is smaller."""
    block_tokens: int
    block_bytes: int
    window_bytes: int = 0
    """Of one window state; 0 for a model without windows."""
    embedding_bytes: int = 0
    """Of one row of an image's embeddings."""
    grammar_kind: str = ""
    """Of the grammars that are obeyed; "" for a model folder without a tokenizer, which obeys none."""
    scores_prompts: bool = True
    """Whether every prompt token's logits are exact; not where windows are replayed."""
    image_token_ids: frozenset[int] = frozenset()
    """Ids that stand at the places of images, all at or above the vocabulary size; empty when no images are taken."""


def answer_tokens(request: Request, limits: Limits) -> int:
    """Return how many tokens the answer can have at most."""
    return min(request.stop.max_tokens, limits.context_tokens - len(request.prompt_token_ids))


def check_request(request: Request, limits: Limits) -> None:
    """Raise what is wrong with a request. An engine fed with such a request would fail for everybody in the batch."""
    if request.fingerprint != limits.fingerprint:
        raise BlocksLost("the request was admitted for another model fingerprint than this replica's")
    if request.HasField("grammar"):
        _check_grammar(request.grammar, limits)
    if request.images and not limits.image_token_ids:
        raise BadImage("this model takes no images", field="messages")
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
    if len(prompt) >= limits.context_tokens:
        raise PromptTooLong(
            f"prompt has {len(prompt)} tokens; with one token of answer it may have {limits.context_tokens - 1}",
            field="prompt",
        )
    _check_images(request.images, prompt, limits)
    if max(_text_of(prompt, request.images), default=0) >= limits.vocab_tokens:
        raise InvalidRequest(f"token ids must be below {limits.vocab_tokens}", field="prompt")
    if request.HasField("num_prompt_logprobs"):
        _check_scores(request, limits)
    if request.stop.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if any(bias.token_id >= limits.vocab_tokens for bias in request.sampling.logit_bias):
        raise BadSampling(f"logit_bias takes token ids below {limits.vocab_tokens}", field="logit_bias")


def _check_scores(request: Request, limits: Limits) -> None:
    if not limits.scores_prompts or request.images:
        what = "prompts with images" if request.images else "this replica, which replays windows approximately,"
        raise InvalidRequest(f"{what} cannot have the logprobs of prompt tokens", field="logprobs")
    count, prompt_tokens = request.num_prompt_logprobs, len(request.prompt_token_ids)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(f"prompt logprobs are at most {MAX_PROMPT_LOGPROBS}", field="logprobs")
    if prompt_tokens * (1 + count) > MAX_SCORES:
        most = MAX_SCORES // (1 + count)
        raise InvalidRequest(
            f"with logprobs and {count} alternatives a prompt may have {most} tokens, this one has {prompt_tokens}",
            field="prompt",
        )


def _check_grammar(grammar: Grammar, limits: Limits) -> None:
    if not limits.grammar_kind:
        raise BadSchema(
            "this model's folder has no tokenizer.json, so no grammar can be obeyed", field="response_format"
        )
    if grammar.kind != limits.grammar_kind:
        raise BadSchema(f"grammars are to be of kind {limits.grammar_kind}", field="response_format")
    if len(grammar.body) > MAX_GRAMMAR_BYTES:
        raise BadSchema(f"grammars have at most {MAX_GRAMMAR_BYTES} bytes", field="response_format")


def _check_images(images: Sequence[ImageRef], prompt: Sequence[int], limits: Limits) -> None:
    """Images lie in the prompt, in order and apart, on their own ids, and say where their embeddings are."""
    end = 0
    for image in images:
        start, end_before, end = image.position, end, image.position + image.num_tokens
        if not end_before <= start < end <= len(prompt):
            raise BadImage(
                f"an image at tokens {start} to {end} overlaps another, or the prompt's end", field="messages"
            )
        if not limits.image_token_ids.issuperset(prompt[start:end]):
            raise BadImage(f"tokens {start} to {end} are not those of an image", field="messages")
        if len(image.content_hash) != HASH_BYTES or len(image.vision_fingerprint) != HASH_BYTES:
            raise BadImage(f"an image needs hashes of {HASH_BYTES} bytes", field="messages")
        if not image.vision_address:
            raise BadImage("an image does not say which vision replica has its embeddings", field="messages")


def _text_of(prompt: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
    """Return the prompt's tokens outside its images."""
    text: list[int] = []
    start = 0
    for image in images:
        text += prompt[start : image.position]
        start = image.position + image.num_tokens
    return text + list(prompt[start:])
