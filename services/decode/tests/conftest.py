"""What do the decode tests share?"""

from pathlib import Path

import pytest

from services.chassis import handoff_lane
from services.decode import lanes
from services.decode.tests.rig import decode_replica


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides wait longer for a connection than the half second after which blocks take the other way."""
    for module in (lanes, handoff_lane):
        monkeypatch.setattr(module, "CONNECT_SECONDS", 20.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is written once."""
    return tmp_path_factory.mktemp("model") / "tiny"


@pytest.fixture(params=["shm", "grpc"])
async def rig(request, folder, tmp_path):
    """A replica that takes KV in either way, and leaves nothing behind: no block, no file."""
    is_shared = request.param == "shm"
    async with decode_replica(folder, shm=tmp_path if is_shared else None, has_lanes=is_shared) as running:
        yield running
        await running.idle()
    assert [] == list(tmp_path.iterdir())
