"""Ten minutes of made-up requests to a whole suite: no 5xx, and afterwards nobody holds a block."""

import asyncio
import time

import httpx
import pytest

from e2e.client import model_name
from e2e.suite import Suite
from services.recipe.tests.test_fuzz import Fuzz

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

SECONDS = 600.0
BATCH = 100


async def used_blocks(suite: Suite) -> int:
    """Blocks that a sequence holds, on all replicas."""
    decoding, prefilling = await suite.decode_loads(), await suite.prefill_loads()
    return sum(load.used_blocks for load in decoding) + sum(load.used_blocks for load in prefilling)


async def test_made_up_requests_for_ten_minutes(model_dir, tmp_path):
    """With state and a real model; each batch's number makes up the same requests again."""
    state = f"sqlite:///{tmp_path / 'state.sqlite3'}"
    async with Suite.running(tmp_path, model=model_dir, dtype="bf16", env={"FATHOM_RECIPE_STATE_URL": state}) as suite:
        async with httpx.AsyncClient(base_url=suite.base_url, timeout=30) as client:
            described = (await client.get("/openapi.json")).json()
            fuzz = Fuzz(client, described, await model_name(client))
            number, end = 0, time.monotonic() + SECONDS
            while time.monotonic() < end:
                await fuzz.run(number, BATCH)
                number += 1
            print(f"{number} batches of {BATCH}: {dict(sorted(fuzz.statuses.items()))}, {fuzz.num_left} left")
        async with asyncio.timeout(60):
            while await used_blocks(suite):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.5)

    assert number > 0
    assert set(fuzz.statuses) <= {200, 400, 403, 404, 405, 409, 413, 429}
