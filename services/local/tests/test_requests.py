"""Is a request's way told as it was?"""

import pytest

from services.chassis import names
from services.local.console.requests import find, newest
from services.local.console.spans import SHOWN_ID
from services.local.tests.span_makers import NOON, TRACE, edge, span, whole_request


def test_a_request_is_told_from_the_top_down() -> None:
    """Parents above children, by time; the totals are what the recipe said."""
    (journey,) = newest([whole_request()], 20, now=NOON)

    assert [(0, "recipe"), (1, "entrypoint"), (2, "entrypoint"), (3, "kvstore")] == [
        (row.depth, row.service) for row in journey.rows[:4]
    ]
    assert ["Kvstore/Lookup", "PrefillLb/Pick"] == [
        row.name for row in journey.rows if row.name.endswith(("up", "Lb/Pick"))
    ][1:3]
    assert (300, 256, 7) == (journey.prompt_tokens, journey.cached_tokens, journey.output_tokens)
    assert ("200 stop", 0.25, 2.0) == (journey.outcome, journey.ttft_seconds, journey.total_seconds)
    assert ("44 tokens computed",) == next(row.notes for row in journey.rows if row.name == "prefill.chunk")


def test_the_way_names_each_call_between_services_once_in_order() -> None:
    """Seven services, and the handoff from prefill to decode."""
    (journey,) = newest([whole_request()], 20, now=NOON)

    assert (
        ("recipe", "entrypoint"),
        ("entrypoint", "kvstore"),
        ("entrypoint", "prefill_lb"),
        ("entrypoint", "prefill"),
        ("entrypoint", "decode_lb"),
        ("entrypoint", "decode"),
        ("prefill", "decode"),
    ) == journey.path


@pytest.mark.parametrize("wanted", ["last", "request-one", "reques", "chatcmpl-request-one", TRACE, "of the caller"])
def test_a_request_is_found_by_every_id_that_people_have(wanted: str) -> None:
    """x-request-id, ours or the caller's own; the answer's id; the trace's; and the begin of an id."""
    shown = {SHOWN_ID: "of the caller"} if wanted == "of the caller" else {}
    found = find([[edge(attributes=shown)]], wanted, now=NOON)

    assert found is not None
    assert (shown.get(SHOWN_ID) or "request-one") == found.id


@pytest.mark.parametrize("wanted", ["", "r", "reque", "request-", "other"])
def test_what_names_no_request_or_several_finds_none(wanted: str) -> None:
    """Too short a begin, one of two, and an unknown id."""
    traces = [[edge()], [edge(request_id="request-two", trace_id="cd" * 16)]]

    assert find(traces, wanted, now=NOON) is None


def test_of_two_requests_with_one_id_the_newest_is_meant() -> None:
    """Callers may send the same x-request-id twice."""
    traces = [[edge()], [edge(trace_id="cd" * 16, at=5.0)]]

    found = find(traces, "request-one", now=NOON)

    assert found is not None
    assert "cd" * 16 in found.also
    assert found == find(traces, "last", now=NOON)


def test_a_request_that_still_runs_shows_what_has_ended() -> None:
    """The recipe's span comes last; until then the trace's id is its name, and its time goes on."""
    known = [each for each in whole_request() if each.service not in {"recipe", "decode"}]
    (journey,) = newest([known], 20, now=NOON + 4)

    assert (TRACE, "running", False) == (journey.id, journey.outcome, journey.is_finished)
    assert 3.9 == pytest.approx(journey.total_seconds)
    assert ["entrypoint", "prefill"] == [row.service for row in journey.rows if row.name.endswith(("generate", "run"))]


def test_a_request_whose_end_was_lost_does_not_run_for_ever() -> None:
    """The entrypoint is done and the recipe silent, or nobody says anything: its time is what is known of it."""
    known = [each for each in whole_request() if each.service != "recipe"]
    inner = [each for each in known if each.name != "entrypoint.generate"]

    for spans, silence in ((known, 5), (inner, 600)):
        heard = max(each.ended for each in spans)
        (running,) = newest([spans], 20, now=heard + silence - 1)
        (lost,) = newest([spans], 20, now=heard + silence)
        assert ("running", "incomplete") == (running.outcome, lost.outcome)
        assert (silence == 5, False) == (running.is_closing, lost.is_closing)
        assert heard - min(each.started for each in spans) == pytest.approx(lost.total_seconds)


def test_a_failure_is_said_once() -> None:
    """Not as a status, a kind of error and a reason that is none."""
    failed = {
        names.HTTP_RESPONSE_STATUS_CODE: 503,
        names.ERROR_TYPE: "503",
        names.GEN_AI_RESPONSE_FINISH_REASONS: ("none",),
    }
    (journey,) = newest([[edge(is_error=True, attributes=failed)]], 20, now=NOON)

    assert "503" == journey.outcome
    assert ("HTTP 503", "300 prompt tokens", "256 cached", "7 out") == journey.rows[0].notes


def test_a_hit_in_prefill_s_own_memory_is_told() -> None:
    """Nothing is read from the KV store then, so no other span tells of it; of none nothing is said."""
    warm, cold = (span(2, "prefill", "prefill.run", 1, attributes={names.MEMORY_TOKENS: count}) for count in (256, 0))

    for run, expected in ((warm, ("256 tokens from prefill's memory",)), (cold, ())):
        (journey,) = newest([[edge(), run]], 20, now=NOON)
        assert expected == journey.rows[1].notes


def test_requests_of_one_trace_are_told_apart() -> None:
    """A caller with a traceparent of its own may ask twice under it."""
    spans = [
        edge(1, "one"),
        span(2, "entrypoint", "a", 1),
        edge(3, "two", at=9.0),
        span(4, "entrypoint", "b", 3, at=9.0),
    ]
    journeys = newest([spans], 20, now=NOON)

    assert [("two", ["chat m", "b"]), ("one", ["chat m", "a"])] == [
        (journey.id, [row.name for row in journey.rows]) for journey in journeys
    ]


def test_a_span_without_its_parent_is_still_shown() -> None:
    """The parent's service was killed before it could send."""
    (journey,) = newest([[edge(), span(7, "decode", "orphan", 6, at=0.5)]], 20, now=NOON)

    assert [(0, "chat m"), (0, "orphan")] == [(row.depth, row.name) for row in journey.rows]


def test_spans_in_a_circle_end_nobody() -> None:
    """Whoever sends nonsense gets no endless loop."""
    (journey,) = newest(
        [[edge(), span(2, "x", "a", 3), span(3, "x", "b", 2), span(4, "x", "own parent", 4)]], 20, now=NOON
    )

    assert ["chat m"] == [row.name for row in journey.rows]
    assert [] == newest([[span(2, "x", "a", 3), span(3, "x", "b", 2)]], 20, now=NOON)


def test_the_newest_are_those_that_began_last() -> None:
    """Whatever order their spans came in."""
    traces = [[edge(1, f"request-{n}", trace_id=f"{n:032x}", at=n)] for n in (3, 9, 1)]

    assert ["request-9", "request-3"] == [journey.id for journey in newest(traces, 2, now=NOON)]


def test_an_attribute_of_another_kind_is_left_out() -> None:
    """A number where a list belongs must not break the page."""
    odd = {names.GEN_AI_RESPONSE_FINISH_REASONS: 3, names.HANDOFF_BYTES: "many", names.GEN_AI_USAGE_INPUT_TOKENS: "x"}
    (journey,) = newest([[edge(attributes=odd)]], 20, now=NOON)

    assert (0, (), "200") == (journey.prompt_tokens, journey.finish_reasons, journey.outcome)
