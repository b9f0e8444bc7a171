"""What do the prefill tests share?"""

from pathlib import Path

import pytest

from services.chassis import handoff_lane


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is waited for longer than the half second after which blocks take the other way."""
    monkeypatch.setattr(handoff_lane, "CONNECT_SECONDS", 20.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is written once."""
    return tmp_path_factory.mktemp("model") / "tiny"
