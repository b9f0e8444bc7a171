"""What do the whole-suite tests share?"""

from pathlib import Path

import pytest

from services.local.pull import pull

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder, made once for the whole checkout."""
    return pull(ROOT / ".fathom" / "models")
