"""Which models can be served right now, and which of a model's fleets takes a request?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.common_pb2 import ModelCard
from services.chassis.errors import ModelNotFound, NoReplica
from services.chassis.registry import REPLICA_STATE_DRAINING, REPLICA_STATE_READY
from services.entrypoint.fleet import choose, models
from services.entrypoint.tests.world import replica

OLD, NEW = b"\x01" * 32, b"\x02" * 32


def of(service, name, model="tiny", fingerprint=OLD, ready=True):
    state = REPLICA_STATE_READY if ready else REPLICA_STATE_DRAINING
    return replica(service, name, model=ModelCard(name=model, fingerprint=fingerprint), state=state)


def prefill(*args, **kwargs):
    return of("prefill", *args, **kwargs)


def decode(*args, **kwargs):
    return of("decode", *args, **kwargs)


def test_a_fleet_needs_both_kinds_of_replica_with_one_fingerprint():
    """Only they can hand KV to each other."""
    with pytest.raises(NoReplica):
        choose("tiny", [prefill("p")], [])
    with pytest.raises(NoReplica):
        choose("tiny", [prefill("p")], [decode("d", fingerprint=NEW)])
    assert OLD == choose("tiny", [prefill("p")], [decode("d")]).fingerprint


def test_a_draining_replica_makes_no_fleet():
    with pytest.raises(NoReplica) as refused:
        choose("tiny", [prefill("p", ready=False)], [decode("d")])
    assert refused.value.retry_after > 0


def test_the_larger_fleet_takes_the_request_and_fingerprints_break_ties():
    """During a rollout all entrypoints change over at the same moment."""
    old, new = [prefill("p0"), decode("d0")], [prefill("p1", fingerprint=NEW), decode("d1", fingerprint=NEW)]
    prefills, decodes = [new[0], old[0]], [new[1], old[1]]

    assert OLD == choose("tiny", prefills, decodes).fingerprint
    assert NEW == choose("tiny", prefills, [*decodes, decode("d2", fingerprint=NEW)]).fingerprint


def test_an_unknown_model_is_not_found_once_others_are_known():
    with pytest.raises(ModelNotFound, match="tiny") as refused:
        choose("huge", [prefill("p")], [decode("d")])
    assert "model" == refused.value.field


def test_before_the_registry_has_answered_nothing_is_denied():
    """A 404 would tell the client never to come back."""
    with pytest.raises(NoReplica):
        choose("tiny", [], [])


def test_models_lists_one_card_a_name():
    prefills = [prefill("p0"), prefill("p1", fingerprint=NEW), prefill("p2", "other"), prefill("p3", "alone")]
    decodes = [decode("d0"), decode("d1", fingerprint=NEW), decode("d2", "other", b"\x03" * 32)]
    prefills[2] = prefill("p2", "other", b"\x03" * 32)
    prefills[3] = prefill("p3", "alone", b"\x04" * 32)

    assert [("other", b"\x03" * 32), ("tiny", OLD)] == [(c.name, c.fingerprint) for c in models(prefills, decodes)]


replicas = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), st.sampled_from([OLD, NEW, b"\x03" * 32]), st.booleans()), max_size=6
)


@given(replicas, replicas, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_choice_does_not_depend_on_order(prefills, decodes, random):
    some = [prefill(f"p{n}", *given_) for n, given_ in enumerate(prefills)]
    others = [decode(f"d{n}", *given_) for n, given_ in enumerate(decodes)]
    listed = models(some, others)

    shuffled = random.sample(some, len(some)), random.sample(others, len(others))
    assert listed == models(*shuffled)
    for card in listed:
        assert {r.model.fingerprint for r in some if r.is_ready} >= {card.fingerprint}
        assert {r.model.fingerprint for r in others if r.is_ready} >= {card.fingerprint}
