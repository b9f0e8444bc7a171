"""How large is the pool of a replica that was not told?"""

import pytest

from kernels.executor import DEFAULT_KV_BYTES
from services.chassis.config import BadSettings
from services.decode.config import DecodeSettings
from services.decode.model import load_model
from services.decode.states import states_bytes
from services.decode.tests.tiny_model import write_tiny_model


@pytest.mark.slow
def test_an_unset_pool_takes_what_suits_the_device(tmp_path):
    """On a CPU 1 GiB, whose pages come with their first use; on a GPU the plan's blocks. Given, it is what was given."""
    settings = DecodeSettings(model=write_tiny_model(tmp_path / "tiny"), dtype="fp32", threads=1)
    stages = []
    executor = load_model(settings, lambda *at: stages.append(at))
    told = load_model(settings.model_copy(update={"kv_bytes": 1 << 20}), lambda *_at: None)

    assert 0 == settings.kv_bytes
    assert DEFAULT_KV_BYTES // executor.layout.block_bytes == executor.num_blocks
    assert (1 << 20) // told.layout.block_bytes == told.num_blocks
    assert [1 << 28, 1 << 18] == [states_bytes(0), states_bytes(1 << 20)]


def test_a_pool_that_cannot_be_is_a_bad_setting(tmp_path):
    """Said with what would do, and for the process to end with what a supervisor need not repeat."""
    settings = DecodeSettings(model=write_tiny_model(tmp_path / "tiny"), dtype="fp32", threads=1, kv_bytes=1000)
    with pytest.raises(BadSettings, match=r"room for 0 blocks of .* bytes; at least 2 are needed"):
        load_model(settings, lambda *_at: None)
