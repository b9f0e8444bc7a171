"""What do the prefill tests share?"""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is written once."""
    return tmp_path_factory.mktemp("model") / "tiny"
