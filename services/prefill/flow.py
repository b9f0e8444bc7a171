"""What becomes of one prompt here, from submit to handoff? Runs on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proto.common_pb2 import FINISH_REASON_UNSPECIFIED, RETENTION_CLASS_CHAT, ImageRef, Request
from proto.prefill_pb2 import HandoffDone, PrefillDeliver, PrefillEvent, PrefillSubmit
from proto.prefill_pb2 import LastChunkStarted as LastChunkStartedEvent
from services.chassis import names
from services.chassis.block_keys import block_keys, image_extras
from services.chassis.embeddings import EmbeddingsFetch, EmbeddingsSource, ImageFeed
from services.chassis.errors import DeadlinePassed, InternalError, to_stream_error
from services.chassis.kvstore_client import Stores, Wanted
from services.chassis.kvstore_writer import Origin
from services.chassis.telemetry import bind_request, current_traceparent, is_sampled, record_span, span
from services.prefill.admission import Limits, answer_tokens, check_request
from services.prefill.first_token import first_token_event
from services.prefill.grammar import first_mask
from services.prefill.handoff import Cargo, Counters, Delivered, Handoff
from services.prefill.loading import allowed_seconds, load_hit, pending_seconds, recompute_seconds
from services.prefill.prompt import (
    ChunkDone,
    EmbeddingsWanted,
    FirstTokenSampled,
    Happening,
    HitFound,
    LastChunkStarted,
    Prompt,
)
from services.prefill.pushing import PromptBlocks
from services.prefill.sampling import sampling_params
from services.prefill.scheduler import Span

if TYPE_CHECKING:
    import grpc.aio

    from kernels.grammar import GrammarFactory
    from services.chassis.engine_thread import EngineThread
    from services.chassis.telemetry import Span as OpenSpan
    from services.prefill.engine import PrefillEngine
    from services.prefill.states import States

DELIVER_SECONDS = 10.0
"""Longest wait for the decode replica's address after the first token; the blocks are held meanwhile."""
HANDOFF_SECONDS = 30.0
"""Longest handoff, waiting for room over there included."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all prompts on this replica share."""

    engine: PrefillEngine
    thread: EngineThread
    limits: Limits
    states: States
    grammars: GrammarFactory | None
    embeddings: EmbeddingsSource
    channel: Callable[[str], grpc.aio.Channel]
    """The cached channel to an address."""
    kvstore: Stores | None
    counters: Counters
    deliver_seconds: float = DELIVER_SECONDS


class PromptFlow:
    """One request on this replica. `send` gets its events, the last one before `run` returns."""

    def __init__(self, submit: PrefillSubmit, around: Surroundings, send: Callable[[PrefillEvent], None]) -> None:
        self._request: Request = submit.request
        self._hit_tokens = submit.hit_tokens
        self._around = around
        self._send = send
        self._happenings: asyncio.Queue[Happening | Exception] = asyncio.Queue()
        self._traceparent = ""
        self._found_tokens: int | None = None  # in the pool, before anything was loaded behind them
        self._cargo: Cargo | None = None
        self._handoff: asyncio.Future[Handoff] = asyncio.get_running_loop().create_future()
        self._delivering: asyncio.Task[Delivered] | None = None

    def deliver_to(self, target: PrefillDeliver) -> None:
        """Start the handoff: room is reserved there while the last chunk is still computed.

        Ignored before `last_chunk_started`, which it answers. A later target takes the place of an earlier one, which
        the entrypoint has given up.
        """
        if self._cargo is None:
            return
        if self._handoff.done():
            self._abandon("moved", "another target was named")
            self._handoff = asyncio.get_running_loop().create_future()
        deadline = min(self._request.deadline_unix_seconds, time.time() + HANDOFF_SECONDS)
        channel = self._around.channel(target.address)
        self._handoff.set_result(Handoff(channel, target, self._cargo, deadline_unix_seconds=deadline))
        if self._delivering is not None:
            self._delivering.cancel()

    async def run(self) -> None:
        """Serve the request; an error becomes its last event. Cancel the task to cancel the request."""
        request = self._request
        bind_request(request.request_id)
        with span("prefill.run", traceparent=request.traceparent) as whole:
            whole.set_attribute(names.REQUEST_ID, request.request_id)
            self._traceparent = current_traceparent()
            try:
                async with asyncio.timeout(request.deadline_unix_seconds - time.time()):
                    await self._serve(whole)
            except TimeoutError:
                self._emit(failed=to_stream_error(DeadlinePassed("the request's deadline passed during prefill")))
            except Exception as error:  # noqa: BLE001 - mapped to its kind; a stranger is logged there
                self._emit(failed=to_stream_error(error))

    async def _serve(self, whole: OpenSpan) -> None:
        check_request(self._request, self._around.limits)
        prompt = self._prompt(await self._allowed())
        self._around.thread.post(self._around.engine.submit, prompt)
        is_delivered = False
        fetch = self._fetch(prompt)
        try:
            first = await self._computed(prompt, fetch)
            whole.set_attribute(names.MEMORY_TOKENS, self._memory_tokens(first.cached_tokens))
            if first.sampled.problem is not None:
                raise InternalError(f"no token could be sampled: {first.sampled.problem}")
            if prompt.num_scores is not None and len(first.scores) != len(prompt.token_ids) - 1:
                raise InternalError("the logits of some prompt tokens are not finite")
            event = first_token_event(self._request, first, answer_tokens(self._request, self._around.limits))
            self._emit(first_token=event)
            if event.token.finish_reason == FINISH_REASON_UNSPECIFIED:
                await self._hand_off(prompt, first)
                is_delivered = True
        finally:
            fetch.close()
            self._around.thread.post(self._around.engine.release, prompt)
            if self._delivering is not None:
                self._delivering.cancel()
            if self._handoff.done() and not is_delivered:
                self._abandon("ended", "the request ended on the prefill side")

    async def _allowed(self) -> bytes | None:
        """Return the mask of the first token, None when it is free."""
        if not self._request.HasField("grammar"):
            return None
        assert self._around.grammars is not None, "admission refuses grammars where none are obeyed"
        return await first_mask(self._around.grammars, self._request.grammar)

    def _prompt(self, allowed_mask: bytes | None) -> Prompt:
        request = self._request
        block_tokens = self._around.limits.block_tokens
        token_ids = tuple(request.prompt_token_ids)
        extra = image_extras(request.images, block_tokens=block_tokens)
        return Prompt(
            token_ids=token_ids,
            keys=block_keys(request.key_root, token_ids, block_tokens=block_tokens, extra=extra),
            sampling=sampling_params(request.sampling),
            priority=request.priority,
            stored_blocks=self._hit_tokens // block_tokens if self._around.kvstore is not None else 0,
            listener=self._happenings.put_nowait,
            allowed_mask=allowed_mask,
            images=ImageFeed(request.images),
            spans=tuple(Span(image.position, image.position + image.num_tokens) for image in request.images),
            origin=Origin(request.tenant, request.retention or RETENTION_CLASS_CHAT),
            num_scores=request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None,
        )

    def _fetch(self, prompt: Prompt) -> EmbeddingsFetch:
        around = self._around

        def deliver(image: ImageRef, embeddings: memoryview) -> None:
            around.thread.post(around.engine.embedded, prompt, image, embeddings)

        return EmbeddingsFetch(self._request, around.embeddings, deliver=deliver, on_error=self._happenings.put_nowait)

    async def _computed(self, prompt: Prompt, fetch: EmbeddingsFetch) -> FirstTokenSampled:
        """Follow the engine until the first token is there."""
        while True:
            happening = await self._happenings.get()
            match happening:
                case HitFound():
                    await self._begin(prompt, happening)
                case EmbeddingsWanted():
                    fetch.want(happening.image)
                case LastChunkStarted():
                    self._announce(prompt)
                case ChunkDone():
                    self._record_chunk(happening)
                case FirstTokenSampled():
                    return happening
                case Exception():
                    raise happening

    async def _begin(self, prompt: Prompt, found: HitFound) -> None:
        """Fetch what the hit consists of: blocks from the KV store, a window state from this host."""
        around, num_tokens = self._around, len(prompt.token_ids)
        if self._found_tokens is None:
            self._found_tokens = found.num_found * around.limits.block_tokens
        matched = found.num_found + len(found.wanted)
        hit, state = await around.states.find_start(prompt.keys[:matched], num_tokens)
        if found.wanted and hit.block_tokens:  # else even with all of them nothing could be reused
            num_loaded = await self._load(prompt, found)
            if num_loaded < len(found.wanted):
                matched = found.num_found + num_loaded
                hit, state = await around.states.find_start(prompt.keys[:matched], num_tokens)
        around.thread.post(around.engine.begin, prompt, hit, state)

    async def _load(self, prompt: Prompt, found: HitFound) -> int:
        """Load blocks from the KV store into the pool; return how many came."""
        around, limits = self._around, self._around.limits
        assert around.kvstore is not None, "without a store no block is said to be stored"
        speed, begun = around.engine.load.tokens_per_second, time.monotonic()
        seconds = allowed_seconds(
            len(found.wanted) * limits.block_tokens,
            tokens_per_second=speed,
            seconds_left=self._request.deadline_unix_seconds - time.time(),
        )
        wanted = Wanted(
            keys=prompt.keys[: found.num_found + len(found.wanted)],
            first_index=found.num_found,
            fingerprint=limits.fingerprint,
            block_bytes=limits.block_bytes,
            request_id=self._request.request_id,
            pending_seconds=pending_seconds(seconds),
        )
        with span("prefill.load_hit") as hop:
            num_loaded = await load_hit(
                around.kvstore,
                wanted,
                lambda payloads: around.thread.call(around.engine.loaded, prompt, payloads),
                timeout_seconds=seconds,
            )
            hop.set_attribute(names.BLOCKS, num_loaded)
        num_tokens = num_loaded * limits.block_tokens
        around.counters.count_load(
            num_tokens,
            seconds=time.monotonic() - begun,
            recompute_seconds=recompute_seconds(num_tokens, tokens_per_second=speed),
        )
        return num_loaded

    def _memory_tokens(self, cached_tokens: int) -> int:
        """Return how many of the cached tokens came from the pool here: all, unless the engine asked for a load."""
        return cached_tokens if self._found_tokens is None else min(self._found_tokens, cached_tokens)

    def _announce(self, prompt: Prompt) -> None:
        """Ask for a decode replica, unless the answer can have only one token."""
        limits = self._around.limits
        if answer_tokens(self._request, limits) == 1:
            return
        self._cargo = Cargo(
            request_id=self._request.request_id,
            fingerprint=limits.fingerprint,
            keys=prompt.keys,
            kv_tokens=len(prompt.token_ids),
            num_blocks=-(-len(prompt.token_ids) // limits.block_tokens),
            block_bytes=limits.block_bytes,
            window_bytes=limits.window_bytes,
        )
        self._emit(last_chunk_started=LastChunkStartedEvent(kv_tokens=len(prompt.token_ids)))

    async def _hand_off(self, prompt: Prompt, first: FirstTokenSampled) -> None:
        with span("handoff") as hop:
            hop.set_attribute(names.KV_TOKENS, len(prompt.token_ids))
            replica, delivered = await self._deliver(prompt, first)
            hop.set_attribute(names.HANDOFF_BACKEND, delivered.backend)
            hop.set_attribute(names.HANDOFF_BYTES, delivered.num_bytes)
        self._around.counters.count_handoff(delivered.backend, delivered.num_bytes)
        done = HandoffDone(replica=replica, num_bytes=delivered.num_bytes, backend=delivered.backend)
        self._emit(handoff_done=done)

    async def _deliver(self, prompt: Prompt, first: FirstTokenSampled) -> tuple[str, Delivered]:
        """Deliver to the target, or to a later one if it changes meanwhile; return its name and what it took."""
        around = self._around
        while True:
            try:
                # Not wait_for: in Python 3.11 it swallows a cancel that comes together with the result.
                async with asyncio.timeout(around.deliver_seconds):
                    handoff = await asyncio.shield(self._handoff)
            except TimeoutError:
                raise DeadlinePassed(f"nobody said within {around.deliver_seconds:g} s where the KV goes") from None
            delivery = handoff.deliver(
                PromptBlocks(around.thread, around.engine, prompt),
                first_token_id=first.sampled.token_id,
                cached_tokens=first.cached_tokens,
            )
            self._delivering = asyncio.create_task(delivery, name="handoff deliver")
            await asyncio.wait([self._delivering])
            if handoff is self._handoff.result():
                return handoff.replica, self._delivering.result()

    def _abandon(self, kind: str, reason: str) -> None:
        self._around.counters.count_abort(kind)
        self._handoff.result().abandon(reason)

    def _record_chunk(self, chunk: ChunkDone) -> None:
        if is_sampled(self._traceparent):
            attributes: dict[str, Any] = {names.CHUNK_TOKENS: chunk.num_tokens}
            record_span(
                "prefill.chunk",
                traceparent=self._traceparent,
                start_unix_seconds=chunk.started,
                end_unix_seconds=chunk.ended,
                **attributes,
            )

    def _emit(self, **event: Any) -> None:  # one keyword of PrefillEvent's oneof
        self._send(PrefillEvent(request_id=self._request.request_id, **event))
