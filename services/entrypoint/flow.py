"""What happens to a request, from admission to its last token? READ THIS FIRST."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from proto.kvstore_pb2 import LookupRequest
from services.chassis import names
from services.chassis.block_keys import block_keys, image_extras
from services.chassis.errors import BlocksLost, InternalError, NoReplica, Overloaded
from services.chassis.telemetry import SpanKind, span
from services.entrypoint.bookings import Booking, book_decode, book_prefill
from services.entrypoint.images import encode_images
from services.entrypoint.legs import DecodeLeg, PrefillLeg

if TYPE_CHECKING:
    from proto.common_pb2 import ModelCard, Request
    from proto.prefill_pb2 import FirstToken, PrefillEvent
    from services.entrypoint.answer import Answer
    from services.entrypoint.peers import Peers


async def generate(request: Request, card: ModelCard, peers: Peers, answer: Answer) -> None:
    """Answer one admitted request, token by token, into `answer`. Raises FathomError when it cannot be finished.

    However it ends - last token, error, cancel, deadline - leaving `held` cancels what still runs on the replicas and
    gives every booking back.
    """
    async with AsyncExitStack() as held:
        request = await encode_images(request, peers)  # before the lookup: they are part of the block keys
        hit_tokens = await look_up_hit(request, card, peers)
        prefill, opening = await begin_prefill(request, hit_tokens, peers, held)
        if opening.HasField("first_token"):  # a one-token answer: there is nothing to hand over
            answer.begin(opening.first_token)
            return

        # Late, so that the choice is fresh; now, so that prefill knows where the KV goes before its last chunk is done.
        kv_tokens = opening.last_chunk_started.kv_tokens
        decode, first_token = await begin_decode(prefill.request, kv_tokens, prefill, peers, held)
        answer.begin(first_token)
        prefill.booking.release()  # it stood for tokens to compute; they are computed

        # The KV travels from prefill to decode without us. Until decode's first token either's failure ends both; a
        # prefill replica that is lost may have finished its part, so decode gets a moment to prove it with a token.
        while not answer.finish_reason:
            answer.add(await decode.next())


LOOKUP_SECONDS = 0.5
"""A store that needs longer costs more than it saves."""

MAX_LOOKUP_BLOCKS = 8192
"""The store's limit for one lookup."""

ROOM_SECONDS = 8.0
"""How long a computed prompt waits for room on a decode replica before its caller hears that all are full. Prefill
keeps it for ten seconds after its first token."""

ROOM_POLL_SECONDS = 0.2
"""Decode replicas report their load this often while it changes."""

_ELSEWHERE = (NoReplica, Overloaded, BlocksLost)
"""Failures of one replica that another one need not share. PeerLost is a NoReplica."""


async def look_up_hit(request: Request, card: ModelCard, peers: Peers) -> int:
    """Return how many leading prompt tokens the KV store holds: whole blocks. A store that is away holds none."""
    tokens = request.prompt_token_ids[:-1]  # the last one is always computed: sampling needs its logits
    if peers.kvstore is None or len(tokens) < card.block_tokens:
        return 0
    with span("kvstore.lookup", kind=SpanKind.CLIENT) as hop:
        extra = image_extras(request.images, block_tokens=card.block_tokens)
        keys = block_keys(request.key_root, tokens, block_tokens=card.block_tokens, extra=extra)[:MAX_LOOKUP_BLOCKS]
        ask = LookupRequest(
            fingerprint=request.fingerprint,
            request_id=request.request_id,  # a lease: what is found now is still there when prefill reads it
            tenant=request.tenant,
            retention=request.retention,
        )
        hit = await peers.kvstore.look_up(keys, ask, seconds=LOOKUP_SECONDS)
        hop.set_attribute(names.BLOCKS, hit.num_blocks)
    hit_tokens = hit.num_blocks * card.block_tokens
    peers.metrics.lookup_failures.inc(hit.num_failed > 0)
    peers.metrics.pending_hit_tokens.inc(hit.num_pending * card.block_tokens)
    peers.metrics.hit_tokens.inc(hit_tokens)
    return hit_tokens


async def begin_prefill(
    request: Request, hit_tokens: int, peers: Peers, held: AsyncExitStack
) -> tuple[PrefillLeg, PrefillEvent]:
    """Have a replica compute the prompt; return its leg and its first word: last chunk started, or the whole answer.

    Until then one replica may fail unseen: nothing was shown or handed over, so another one starts again.
    """
    tried: list[str] = []
    try:
        return await _try_prefill(request, hit_tokens, peers, held, tried)
    except _ELSEWHERE as first:
        if not tried:  # the balancer itself said no
            raise
        peers.note_retry("prefill", tried[0], first)
        if isinstance(first, BlocksLost) and request.images:
            # Vision keeps embeddings for a while only. That was no fault of the replica's: it may be picked again.
            request = await encode_images(request, peers)
            tried.clear()
        try:
            return await _try_prefill(request, hit_tokens, peers, held, tried)
        except NoReplica:
            raise first from None  # there is no other one: what befell the first is the reason


async def _try_prefill(
    request: Request, hit_tokens: int, peers: Peers, held: AsyncExitStack, tried: list[str]
) -> tuple[PrefillLeg, PrefillEvent]:
    async with AsyncExitStack() as attempt:
        booking = await attempt.enter_async_context(book_prefill(request, hit_tokens, peers, exclude=tried))
        tried.append(booking.replica)
        leg = PrefillLeg(peers.prefill(booking), booking, request, hit_tokens=hit_tokens)
        opening = await (await attempt.enter_async_context(leg)).next()
        is_whole_answer = bool(opening.first_token.token.finish_reason)
        if not (opening.HasField("last_chunk_started") or is_whole_answer):
            raise InternalError(f"{booking.replica} opened with {opening.WhichOneof('event')}")
        held.push_async_exit(attempt.pop_all())
    return leg, opening


async def begin_decode(
    request: Request, kv_tokens: int, prefill: PrefillLeg, peers: Peers, held: AsyncExitStack
) -> tuple[DecodeLeg, FirstToken]:
    """Find the KV a place and tell prefill; return decode's leg and, once prefill has it, the first token.

    Until then one decode replica may fail or refuse unseen: the KV is still with prefill, which is told another place.
    """
    tried: list[str] = []
    try:
        return await _try_decode(request, kv_tokens, prefill, peers, held, tried)
    except _ELSEWHERE as first:
        if not tried or prefill.error is not None:
            raise
        peers.note_retry("decode", tried[0], first)
        try:
            return await _try_decode(request, kv_tokens, prefill, peers, held, tried)
        except NoReplica:
            raise first from None


async def _try_decode(
    request: Request, kv_tokens: int, prefill: PrefillLeg, peers: Peers, held: AsyncExitStack, tried: list[str]
) -> tuple[DecodeLeg, FirstToken]:
    async with AsyncExitStack() as attempt:
        booking = await _book_room(request, kv_tokens, prefill, peers, attempt, tried)
        tried.append(booking.replica)
        leg = await attempt.enter_async_context(DecodeLeg(peers.decode(booking), booking, request))
        leg.pair(prefill)
        await prefill.deliver(leg)
        event = await prefill.next()
        if not event.HasField("first_token"):
            raise InternalError(f"{prefill.booking.replica} sent {event.WhichOneof('event')} for the first token")
        held.push_async_exit(attempt.pop_all())
    return leg, event.first_token


async def _book_room(
    request: Request, kv_tokens: int, prefill: PrefillLeg, peers: Peers, attempt: AsyncExitStack, tried: list[str]
) -> Booking:
    """Book a decode replica; when all are full, wait a while.

    The prompt is paid for, and answers end all the time. The first token waits too: until there is a place for the
    rest, the caller can still get a clean refusal.
    """
    give_up = asyncio.get_running_loop().time() + ROOM_SECONDS
    while True:
        try:
            return await attempt.enter_async_context(book_decode(request, kv_tokens, peers, exclude=tried))
        except Overloaded:
            if prefill.error is not None or asyncio.get_running_loop().time() >= give_up:
                raise
        await asyncio.sleep(ROOM_POLL_SECONDS)
