"""Does a store keep its cap and its lives for weeks? On a clock that is moved, so weeks take seconds."""

from pathlib import Path

import pytest

from services.kvstore.tests.calendar import Calendar, WatchedDisk
from services.kvstore.tests.objects import Clock

pytestmark = pytest.mark.slow


async def live(folder: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int, days: float, minutes: float) -> Calendar:
    """Live through so many days and a silent fortnight; return what came of it."""
    clock = Clock()
    clock.rule(monkeypatch)
    monkeypatch.setattr("services.kvstore.store.Disk", WatchedDisk)
    calendar = Calendar(folder, clock, seed)
    print(f"seed {seed}: {days} days, a step every {minutes} minutes")  # noqa: T201 - shown when it fails
    await calendar.play(days, minutes)
    await calendar.fall_silent()
    await calendar.close()
    return calendar


async def test_physical_bytes_stay_under_the_cap_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy one, at every step and within each, by what the file system says; wrong bytes and late hits there are none."""
    calendar = await live(tmp_path, monkeypatch, seed=20, days=1, minutes=5)
    assert calendar.num_steps > 50
    assert min(calendar.evicted["capacity"], calendar.evicted["quota"], calendar.refreshed_blocks) > 0
    assert calendar.most_bytes > 6 << 20  # a store that kept nothing would stay under any cap


async def test_physical_bytes_stay_under_the_cap_for_four_weeks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quiet ones, in which lives end: all that has an end goes in time, whatever was hit, pinned or deleted before."""
    calendar = await live(tmp_path, monkeypatch, seed=7, days=28, minutes=360)
    assert min(calendar.evicted.values()) > 0
    assert calendar.refreshed_blocks > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize("minutes", [5.0, 360.0])
async def test_physical_bytes_stay_under_the_cap_for_months(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, minutes: float
) -> None:
    """The same for other orders of events: busy days, or three quiet months."""
    await live(tmp_path, monkeypatch, seed=seed, days=5 if minutes < 10 else 90, minutes=minutes)
