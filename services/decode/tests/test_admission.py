"""Which images and token ids may a request have here?"""

import pytest

from proto.common_pb2 import ImageRef, Request, StopRules
from services.chassis.errors import BadImage, InvalidRequest
from services.decode.admission import Limits, check_request

LIMITS = Limits(
    fingerprint=b"f" * 32,
    vocab_tokens=100,
    context_tokens=64,
    block_tokens=16,
    block_bytes=1,
    image_token_ids=frozenset({101, 102}),
)


def image(position=2, num_tokens=3, **fields):
    given = {"content_hash": b"c" * 32, "vision_fingerprint": b"v" * 32, "vision_address": "127.0.0.1:1"} | fields
    return ImageRef(position=position, num_tokens=num_tokens, **given)


def request(*images, tokens=(5, 6, 102, 101, 101, 7)):
    return Request(fingerprint=b"f" * 32, prompt_token_ids=tokens, images=images, stop=StopRules(max_tokens=1))


def test_an_image_on_its_own_ids_is_let_in():
    """One, several side by side, and none."""
    check_request(request(image()), LIMITS)
    check_request(request(image(0, 2), image(2, 2), tokens=(102, 101, 102, 101)), LIMITS)
    check_request(request(tokens=(5, 99)), LIMITS)


@pytest.mark.parametrize(
    "images",
    [
        [image(1)],
        [image(4)],
        [image(3, 9)],
        [image(2, 0)],
        [image(), image()],
        [image(3, 2), image(2, 1)],
        [image(content_hash=b"short")],
        [image(vision_fingerprint=b"")],
        [image(vision_address="")],
    ],
)
def test_an_image_that_cannot_stand_there_is_refused(images):
    """On other tokens, past the end, overlapping, out of order, or without hash or address."""
    with pytest.raises(BadImage):
        check_request(request(*images), LIMITS)


@pytest.mark.parametrize(
    "tokens", [(5, 6, 102, 101, 101, 101), (100, 6, 102, 101, 101, 7), (5, 6, 102, 101, 101, 4000)]
)
def test_ids_past_the_vocabulary_stand_in_images_only(tokens):
    """Anywhere else they would read past the embedding."""
    with pytest.raises(InvalidRequest):
        check_request(request(image(), tokens=tokens), LIMITS)


def test_a_model_without_images_takes_none():
    """Whatever the ids say."""
    blind = Limits(b"f" * 32, vocab_tokens=100, context_tokens=64, block_tokens=16, block_bytes=1)
    with pytest.raises(BadImage, match="takes no images"):
        check_request(request(image()), blind)
