"""Is no more kept of a span than may be, and of nonsense nothing?"""

import gc
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis import names
from services.local.console.spans import KEPT, MAX_TEXT, Malformed, read_spans
from services.local.console.traces import MAX_TRACE_BYTES, TraceStore
from services.local.tests.span_makers import edge, message, span


def test_only_known_attributes_are_kept() -> None:
    """A service that put a prompt into a span would not get it past this door."""
    secret = {"gen_ai.prompt": "my diary", "token_ids": "1 2 3", names.REPLICA: "prefill-0"}
    spans, num_dropped = read_spans(message({"attributes": secret}).SerializeToString())

    assert ({names.REPLICA: "prefill-0"}, 0) == (spans[0].attributes, num_dropped)
    assert not [name for name in KEPT if "prompt" in name or "token_ids" in name or "message" in name]


def test_texts_are_short_and_cannot_steer_a_terminal() -> None:
    """Escape sequences and newlines of a span's name or attribute are not printed."""
    spans, _ = read_spans(message({"name": "\x1b[2Jgone\n" + "x" * 999}).SerializeToString())

    assert "?[2Jgone?x" == spans[0].name[:10]
    assert MAX_TEXT == len(spans[0].name)


@pytest.mark.parametrize(
    "broken",
    [
        {"trace_id": b"short"},
        {"trace_id": bytes(16)},
        {"span_id": bytes(8)},
        {"span_id": b""},
        {"parent_span_id": b"12345"},
        {"start_time_unix_nano": 0},
        {"end_time_unix_nano": 1},
    ],
    ids=lambda fields: next(iter(fields)) + "=" + str(len(repr(fields))),
)
def test_a_span_that_cannot_be_is_dropped_and_counted(broken) -> None:
    """Its neighbours in the message are kept."""
    spans, num_dropped = read_spans(message(broken, {"name": "good"}).SerializeToString())

    assert (["good"], 1) == ([each.name for each in spans], num_dropped)


def test_spans_of_nobody_are_dropped() -> None:
    """A span without a service has no place on the way."""
    assert ([], 1) == read_spans(message({}, service="").SerializeToString())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60), st.binary(max_size=4))
def test_any_bytes_are_spans_or_malformed(noise: bytes, place: int, patch: bytes) -> None:
    """Nothing else is ever raised: for noise, and for a good message that was damaged."""
    good = message({"attributes": {names.REPLICA: "a"}}).SerializeToString()
    for bytes_ in (noise, good[:place] + patch + good[place + len(patch) :]):
        try:
            read_spans(bytes_)
        except Malformed:
            continue


def test_the_store_keeps_the_newest_traces() -> None:
    """By when something last came for them: a long request is not lost for many short ones."""
    store = TraceStore(max_traces=2)
    for number, trace in ((1, "long"), (2, "b"), (3, "long"), (4, "c")):
        store.add([span(number, "prefill", "x", trace_id=trace)])

    assert [["c"], ["long", "long"]] == [[each.trace_id for each in spans] for spans in store.newest()]
    assert (2, 1) == (len(store), store.num_evicted)


def test_the_store_stays_within_its_bytes() -> None:
    """However many spans come, and however they are spread over traces."""
    store = TraceStore(max_bytes=50_000)
    for number in range(500):
        store.add([span(number, "prefill", "x" * 100, trace_id=f"t{number % 97}")])
        assert store.num_bytes <= 50_000

    assert store.num_bytes == sum(each.num_bytes for spans in store.newest() for each in spans)
    assert store.num_evicted


def test_a_span_that_comes_twice_is_kept_once() -> None:
    """A service that heard no answer sends again."""
    store = TraceStore()
    store.add([span(1, "decode", "x"), span(1, "decode", "x")])

    assert [1] == [len(spans) for spans in store.newest()]


def test_a_full_trace_still_takes_the_span_that_names_it() -> None:
    """The recipe's comes last of all, and tells of what request the others were."""
    store = TraceStore()
    num_full = MAX_TRACE_BYTES // span(1, "prefill", "x").num_bytes
    store.add(span(number, "prefill", "x") for number in range(2, num_full + 12))
    store.add([edge()])

    assert 10 == store.num_overflowing
    assert "recipe" in {each.service for each in next(store.newest())}


def test_what_a_span_is_said_to_take_is_what_it_takes() -> None:
    """The bound of the store is one of real memory: the estimate is not too small, and not twice too large."""
    attributes = {names.REQUEST_ID: "r" * 32, names.GEN_AI_RESPONSE_ID: "i" * 40}
    wires = [{"name": f"span {n}", "trace_id": n.to_bytes(16, "big"), "attributes": attributes} for n in range(1, 1001)]
    bytes_ = message(*(dict(wire) for wire in wires)).SerializeToString()
    store = TraceStore(max_traces=10_000)
    store.add(read_spans(bytes_)[0][:1])  # whatever is made once
    gc.collect()
    tracemalloc.start()
    store.add(read_spans(bytes_)[0])
    gc.collect()
    real, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert real <= store.num_bytes <= 2 * real
