"""What do all tests of the conductor need? A store that may take its time."""

import pytest

from services.entrypoint import flow


@pytest.fixture(autouse=True)
def patient_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a lookup may take longer than it is worth in service; tests say what it finds."""
    monkeypatch.setattr(flow, "LOOKUP_SECONDS", 10.0)
