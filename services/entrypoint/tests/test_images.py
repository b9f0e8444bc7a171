"""How do a request's images become embeddings that prefill can fetch?"""

import hashlib

import pytest

from proto.common_pb2 import ImageRef, ModelCard, StreamError
from services.chassis.block_keys import block_keys, image_extras, key_root
from services.chassis.errors import (
    BadImage,
    BlocksLost,
    DeadlinePassed,
    NoReplica,
    Overloaded,
    PeerLost,
    to_stream_error,
)
from services.entrypoint.tests.doubles import BLOCK_TOKENS, CARD
from services.entrypoint.tests.world import CLUSTER_KEY, World

VOCAB = CARD.vocab_tokens
PICTURE = [VOCAB + 2] + [VOCAB + 1] * 5
PROMPT = [*range(1, 15), *PICTURE, *range(20, 40)]
"""The image lies across the boundary of the first two blocks."""
SEEING = ModelCard()
SEEING.CopyFrom(CARD)
SEEING.takes_images = True
DATA = b"a picture"


def image(**changes):
    given = {
        "content_hash": hashlib.sha256(DATA).digest(), "position": 14, "num_tokens": 6, "data": DATA,
        "media_type": "image/png",
    }  # fmt: skip
    return ImageRef(**{**given, **changes})


def seeing(**options):
    return World(card=SEEING, **options)


def picture_request(world, **changes):
    return world.request(prompt_token_ids=PROMPT, images=[image()], **changes)


async def test_images_are_encoded_before_the_lookup():
    """Their hash and the vision model's fingerprint are part of the keys that are looked up."""
    async with seeing() as world:
        call = await world.ask(picture_request(world))

    assert ["vision", "lookup", "prefill_pick"] == world.log[:3]
    named = image(vision_fingerprint=b"v" * 32)
    root = key_root(CLUSTER_KEY, CARD.fingerprint, b"")
    extra = image_extras([named], block_tokens=BLOCK_TOKENS)
    expected = block_keys(root, PROMPT[:-1], block_tokens=BLOCK_TOKENS, extra=extra)
    assert expected == tuple(world.kvstore.asked[0].block_keys)
    assert expected[0] != block_keys(root, PROMPT[:-1], block_tokens=BLOCK_TOKENS)[0]
    assert 4 == len(call.tokens)


async def test_engines_get_the_place_of_the_embeddings_and_not_the_bytes():
    """Both need hash and fingerprint for their block keys; prefill dials the address."""
    async with seeing() as world:
        await world.ask(picture_request(world))

    [asked] = world.vision.asked
    assert [(DATA, "image/png")] == [(each.data, each.media_type) for each in asked.images]
    for submitted in (world.prefills["prefill-0"].submitted[0], world.decodes["decode-0"].submitted[0]):
        [got] = submitted.request.images
        assert (b"", "vision-0:50051", b"v" * 32) == (got.data, got.vision_address, got.vision_fingerprint)
        assert (image().content_hash, 14, 6) == (got.content_hash, got.position, got.num_tokens)


async def test_text_does_not_pass_by_vision():
    """Not even when it is away."""
    async with seeing() as world:
        await world.crash("vision")
        call = await world.ask()
    assert (4, []) == (len(call.tokens), world.vision.asked)


async def test_a_model_without_images_refuses_at_once():
    """400 with the field, and nobody was asked."""
    async with World() as world:
        call = await world.ask(picture_request(world))
    assert (BadImage, "messages", []) == (type(call.error), call.error.field, world.log)


@pytest.mark.parametrize(
    "refusal", [BadImage("damaged", field="messages"), Overloaded("64 images are in line", retry_after=2.0)]
)
async def test_what_vision_says_reaches_the_caller(refusal):
    """The caller's mistake is not tried again, and a full encoder not pressed."""
    async with seeing() as world:
        world.vision.errors = [refusal]
        call = await world.ask(picture_request(world))
    assert (type(refusal), refusal.message) == (type(call.error), call.error.message)
    assert (refusal.field, refusal.retry_after, 1) == (
        call.error.field,
        call.error.retry_after,
        len(world.vision.asked),
    )


async def test_a_lost_encoder_is_tried_once_more():
    """One restart in between goes unseen."""
    async with seeing() as world:
        world.vision.errors = [PeerLost("restarting")]
        call = await world.ask(picture_request(world))
    assert (4, 2) == (len(call.tokens), len(world.vision.asked))
    assert 1 == world.metric("fathom_entrypoint_retries_total", leg="vision")


async def test_an_encoder_that_stays_away_is_told():
    """503 in less than two seconds; nothing was booked for a request that cannot begin."""
    async with seeing() as world:
        await world.crash("vision")
        call = await world.submit(picture_request(world))
        await call.end(seconds=10)
    assert (PeerLost, []) == (type(call.error), world.prefill_lb.picks)


async def test_a_slow_encoder_is_not_the_callers_deadline():
    """Its own time limit passed, not the request's."""
    async with seeing() as world:
        world.vision.errors = [DeadlinePassed("too slow")]
        call = await world.ask(picture_request(world))
    assert (PeerLost, 1) == (type(call.error), len(world.vision.asked))


async def test_without_an_encoder_images_wait_for_one():
    """The model takes images, but nobody said where they are encoded: not the caller's mistake."""
    async with seeing(has_vision=False) as world:
        call = await world.ask(picture_request(world))
    assert NoReplica is type(call.error)


async def test_an_image_that_fills_other_places_is_refused():
    """Whoever laid out the prompt and whoever encodes must agree about every place."""
    async with seeing() as world:
        world.vision.num_tokens = 10
        call = await world.ask(picture_request(world))
    assert BadImage is type(call.error)
    assert "6 places in the prompt; the model fills 10" in call.error.message


def lost() -> StreamError:
    return to_stream_error(BlocksLost("the embeddings of an image are not here any more"))


class Once(dict[str, StreamError]):
    """Errors that happen the first time only."""

    def __getitem__(self, phase):
        return self.pop(phase)


async def test_lost_embeddings_are_made_again():
    """Vision let go of them before prefill came: the image is encoded again, and the only replica tries again."""
    async with seeing(num_prefill=1) as world:
        world.prefills["prefill-0"].errors = Once(prefill=lost())
        call = await world.ask(picture_request(world))
    assert (4, 2) == (len(call.tokens), len(world.vision.asked))
    assert [DATA, DATA] == [each.images[0].data for each in world.vision.asked]
    assert 2 == len(world.prefills["prefill-0"].submitted)


async def test_decode_hears_where_the_new_embeddings_are():
    """A preempted answer fetches them again: not from the encoder that lost them."""
    async with seeing(num_prefill=1) as world:
        world.stops.close("prefill")
        world.prefills["prefill-0"].errors = Once(prefill=lost())
        call = await world.submit(picture_request(world))
        await world.stops.reached("prefill")
        world.vision.named = "vision-1:50051"
        world.stops.open("prefill")
        await call.end()

    assert 4 == len(call.tokens)
    [submitted] = world.decodes["decode-0"].submitted
    assert "vision-1:50051" == submitted.request.images[0].vision_address


async def test_another_vision_model_in_between_ends_the_request():
    """The keys of its KV were made for the first one: mixing the two would poison the store."""
    async with seeing() as world:
        world.stops.close("prefill")
        world.prefills["prefill-0"].errors["prefill"] = lost()
        call = await world.submit(picture_request(world))
        await world.stops.reached("prefill")
        world.vision.fingerprint = b"w" * 32
        world.stops.open("prefill")
        await call.end()
    assert PeerLost is type(call.error)
    assert [] == world.prefills["prefill-1"].submitted
