"""What do all tests of the conductor need? Peers that may take their time."""

import pytest

from services.entrypoint import bookings, flow, legs


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a lookup or a pick may take longer than it is worth in service; tests say what it gives."""
    monkeypatch.setattr(flow, "LOOKUP_SECONDS", 10.0)
    monkeypatch.setattr(bookings, "PICK_SECONDS", 10.0)
    monkeypatch.setattr(legs, "CONNECT_SECONDS", 10.0)
