"""Wherever a request ends early, nobody keeps working for it and nothing stays booked."""

import time

import pytest

from proto.common_pb2 import FinishReason
from services.chassis.errors import DeadlinePassed, PeerLost
from services.entrypoint import bookings
from services.entrypoint.tests.world import PROMPT, World, eventually

SOON_SECONDS = 9.0
"""Two seconds are promised; the machine that runs the tests may be three times slower than a server."""
PREFILL, DECODE = "prefill-0", "decode-0"
# Where the request stands -> tokens its caller has then, and the replicas that must hear of its end.
PHASES = {
    "lookup": (0, []),
    "prefill_pick": (0, []),
    "prefill": (0, [PREFILL]),
    "decode_pick": (0, [PREFILL]),
    "first_token": (0, [DECODE, PREFILL]),
    "handoff": (1, [DECODE, PREFILL]),
    "decode_1": (1, [DECODE]),
    "decode_3": (3, [DECODE]),
}


def some_fast(*fast):
    """All phases; those not named here run with the slow tests only."""
    return [phase if phase in fast else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]


async def stopped_at(world, phase, **changes):
    """Return a call that waits in `phase`, with all earlier tokens received."""
    world.stops.close(phase)
    call = await world.submit(**changes)
    await world.stops.reached(phase)
    if DECODE in PHASES[phase][1]:
        await world.stops.reached("decode_submit")
    await call.receive(PHASES[phase][0])
    if phase.startswith("decode_") and phase != "decode_pick":
        await world.prefill_ended()
    return call


async def check_clean(world, phase):
    """Replicas were told, and bookings made by a pick that was under way come back as well."""
    await eventually(lambda: PHASES[phase][1] == world.cancelled())
    world.stops.open(phase)
    await world.settled()
    assert PHASES[phase][1] == world.cancelled()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancelled_request_ends_everywhere(phase):
    """The caller hears the usage until then."""
    async with World() as world:
        call = await stopped_at(world, phase)
        await call.cancel()
        last = await call.end(seconds=SOON_SECONDS)

        assert FinishReason.FINISH_REASON_CANCELLED == last.finish_reason
        assert not last.HasField("error")
        assert (len(PROMPT), 0, PHASES[phase][0]) == call.usage
        await check_clean(world, phase)
        assert world.reasons() <= {"stop_string"}
        assert 1 == world.metric("fathom_entrypoint_requests_total", outcome="cancelled")


@pytest.mark.parametrize("phase", some_fast("prefill_pick", "handoff", "decode_3"))
async def test_a_recipe_that_goes_away_ends_its_requests(phase):
    async with World() as world:
        await stopped_at(world, phase)
        await world.recipe.close()

        await check_clean(world, phase)
        assert world.reasons() <= {"disconnect"}


@pytest.mark.slow
@pytest.mark.parametrize("phase", some_fast("prefill", "handoff"))
async def test_a_deadline_ends_a_request_everywhere(phase):
    async with World() as world:
        call = await stopped_at(world, phase, deadline_unix_seconds=time.time() + 2.0)
        await call.end(seconds=SOON_SECONDS)

        assert DeadlinePassed is type(call.error)
        assert PHASES[phase][0] == len(call.tokens)
        await check_clean(world, phase)
        assert world.reasons() <= {"deadline"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "victim", "survivors"),
    [
        ("prefill_pick", "prefill_lb", []),
        ("prefill", PREFILL, []),
        ("decode_pick", "decode_lb", [PREFILL]),
        ("decode_pick", PREFILL, []),
        ("first_token", PREFILL, [DECODE]),
        ("first_token", DECODE, [PREFILL]),
        ("handoff", PREFILL, [DECODE]),
        ("handoff", DECODE, [PREFILL]),
        ("decode_1", DECODE, []),
        ("decode_3", DECODE, []),
    ],
)
async def test_a_lost_peer_ends_the_request_within_two_seconds(phase, victim, survivors):
    """And whoever still works for it is told."""
    async with World(num_prefill=1, num_decode=1) as world:
        call = await stopped_at(world, phase)
        started = time.monotonic()
        await world.crash(victim)
        if phase == "decode_pick" and victim == PREFILL:
            world.stops.open(phase)
        await call.end(seconds=SOON_SECONDS)

        assert PeerLost is type(call.error)
        assert time.monotonic() - started < SOON_SECONDS
        await eventually(lambda: survivors == [n for n in world.cancelled() if n != victim])
        await eventually(lambda: not len(world.requests))
        for balancer in {world.prefill_lb, world.decode_lb}:
            await eventually(lambda b=balancer: not b.booked or victim == f"{b.kind}_lb")


@pytest.mark.slow
async def test_a_hanging_balancer_is_a_lost_one(monkeypatch):
    monkeypatch.setattr(bookings, "PICK_SECONDS", 1.5)
    async with World() as world:
        call = await stopped_at(world, "prefill_pick")
        await call.end(seconds=SOON_SECONDS)

        assert PeerLost is type(call.error)
