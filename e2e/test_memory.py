"""Do the services that hold no model stay as small as promised?"""

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

TORCH_FREE = ("recipe", "entrypoint", "prefill_lb", "decode_lb", "kvstore")


async def test_an_idle_service_without_torch_takes_at_most_120_mib(shared_suite):
    """With all that a service can have: traces exported, responses kept, a real model's tokenizer."""
    taken = {name: psutil.Process(await shared_suite.pid(f"{name}-0")).memory_info().rss / 2**20 for name in TORCH_FREE}

    assert {} == {name: mib for name, mib in taken.items() if mib > 120}
