"""May this request enter, and is it one that the model can answer?"""

import hashlib

import pytest

from proto.common_pb2 import ImageRef, LogitBias, ModelCard, Request, SamplingParams, StopRules
from services.chassis.block_keys import key_root
from services.chassis.errors import BadImage, InvalidRequest, Overloaded, PromptTooLong
from services.entrypoint.admission import DEFAULT_SECONDS, admit, admitted, check, tenant_salt

CARD = ModelCard(name="tiny", fingerprint=b"f" * 32, context_tokens=64, block_tokens=16, vocab_tokens=1000)


def request(**changes):
    given = {"request_id": "r", "model": "tiny", "prompt_token_ids": [1, 2, 3], "stop": StopRules(max_tokens=8)}
    return Request(**{**given, **changes})


def test_a_full_house_refuses_with_a_time():
    admit(255, max_requests=256)
    with pytest.raises(Overloaded) as refused:
        admit(256, max_requests=256)
    assert refused.value.retry_after > 0


@pytest.mark.parametrize("tokens", [1, 63])
def test_a_prompt_that_leaves_room_for_one_token_enters(tokens):
    check(request(prompt_token_ids=[999] * tokens), CARD)


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"request_id": ""}, InvalidRequest, "request_id"),
        ({"prompt_token_ids": []}, InvalidRequest, "prompt"),
        ({"prompt_token_ids": [1] * 64}, PromptTooLong, "prompt"),
        ({"prompt_token_ids": [1, 1000]}, InvalidRequest, "prompt"),
        ({"stop": StopRules(max_tokens=0)}, InvalidRequest, "max_tokens"),
        ({"stop": StopRules(max_tokens=1, stop_token_ids=[1000])}, InvalidRequest, "stop"),
        ({"sampling": SamplingParams(logit_bias=[LogitBias(token_id=1000)])}, InvalidRequest, "logit_bias"),
        ({"images": [ImageRef(num_tokens=1)]}, BadImage, "messages"),
        ({"prompt_token_ids": [1, 1002, 1001]}, InvalidRequest, "prompt"),
        ({"retention": 3}, InvalidRequest, "retention"),
        ({"deadline_unix_seconds": float("nan")}, InvalidRequest, "deadline_unix_seconds"),
        ({"deadline_unix_seconds": float("inf")}, InvalidRequest, "deadline_unix_seconds"),
    ],
)
def test_what_the_model_cannot_answer_names_the_field(changes, error, field):
    with pytest.raises(error) as refused:
        check(request(**changes), CARD)
    assert (error, field) == (type(refused.value), refused.value.field)


SEEING = ModelCard(
    name="tiny", fingerprint=b"f" * 32, context_tokens=64, block_tokens=16, vocab_tokens=1000, takes_images=True
)
PICTURE = [1002, 1001, 1001, 1001]


def image(position, **changes):
    given = {"content_hash": b"h" * 32, "position": position, "num_tokens": 4, "data": b"png"}
    return ImageRef(**{**given, **changes})


def test_images_on_their_own_places_enter():
    """At both ends, and side by side."""
    check(request(prompt_token_ids=[*PICTURE, 5, *PICTURE, *PICTURE], images=[image(0), image(5), image(9)]), SEEING)


@pytest.mark.parametrize(
    ("tokens", "images"),
    [
        ([5, *PICTURE], [image(0)]),
        ([5, *PICTURE], [image(1, num_tokens=5)]),
        ([5, *PICTURE], [image(1, num_tokens=0)]),
        ([5, *PICTURE], [image(1), image(1)]),
        ([*PICTURE, *PICTURE], [image(4), image(0)]),
        ([*PICTURE, *PICTURE], [image(0, num_tokens=8)]),
        ([1001] * 4, [image(0)]),
        (PICTURE, [image(0, content_hash=b"")]),
        (PICTURE, [image(0, data=b"")]),
    ],
)
def test_images_beside_their_places_are_refused(tokens, images):
    """Misplaced, overlapping, out of order, past the end, without hash or bytes: engines trust what is said here."""
    with pytest.raises(BadImage) as refused:
        check(request(prompt_token_ids=tokens, images=images), SEEING)
    assert "messages" == refused.value.field


def test_image_ids_without_an_image_are_refused():
    """They lie outside the vocabulary: nothing could be embedded there."""
    with pytest.raises(InvalidRequest, match="1002 is outside") as refused:
        check(request(prompt_token_ids=[*PICTURE, *PICTURE], images=[image(0)]), SEEING)
    assert "prompt" == refused.value.field


def test_where_embeddings_lie_is_not_the_callers_to_say():
    """A forged address would make prefill dial it."""
    forged = request(images=[image(0, vision_address="evil:1", vision_fingerprint=b"x" * 32)])
    [kept] = admitted(forged, SEEING, cluster_key=b"k" * 32, now=0.0).images
    assert ("", b"", b"png") == (kept.vision_address, kept.vision_fingerprint, kept.data)


def test_an_admitted_request_is_complete_and_the_original_untouched():
    original = request(tenant="acme")
    before = original.SerializeToString()

    full = admitted(original, CARD, cluster_key=b"k" * 32, now=100.0)

    assert before == original.SerializeToString()
    assert (CARD.fingerprint, 100.0 + DEFAULT_SECONDS) == (full.fingerprint, full.deadline_unix_seconds)
    assert key_root(b"k" * 32, CARD.fingerprint, hashlib.sha256(b"acme").digest()) == full.key_root
    assert 5.0 == admitted(request(deadline_unix_seconds=5), CARD, cluster_key=b"k", now=100.0).deadline_unix_seconds


def test_tenants_share_no_blocks():
    assert [0, 32, 32] == [len(salt) for salt in map(tenant_salt, ("", "a", "b"))]
    assert tenant_salt("a") != tenant_salt("b")


def test_what_a_caller_claims_about_keys_is_overwritten():
    """A caller that names another tenant's root must not get it."""
    forged = request(key_root=b"x" * 32, fingerprint=b"x" * 32)

    full = admitted(forged, CARD, cluster_key=b"k" * 32, now=0.0)

    assert (CARD.fingerprint, key_root(b"k" * 32, CARD.fingerprint, b"")) == (full.fingerprint, full.key_root)
