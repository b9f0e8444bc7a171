"""What do the decode tests share?"""

from pathlib import Path

import pytest

from services.decode.tests.rig import decode_replica


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is written once."""
    return tmp_path_factory.mktemp("model") / "tiny"


@pytest.fixture(params=["shm", "grpc"])
async def rig(request, folder, tmp_path):
    """A replica that takes KV in either way, and leaves nothing behind: no block, no file."""
    async with decode_replica(folder, shm=tmp_path if request.param == "shm" else None) as running:
        yield running
        await running.idle()
    assert [] == list(tmp_path.iterdir())
