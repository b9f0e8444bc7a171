"""Is a response that goes on in the background still its caller's: tenant, class, priority, place and record?"""

from pathlib import Path
from typing import Any

import pytest

from proto.common_pb2 import RetentionClass
from services.recipe.tests.running import serve_recipe
from services.recipe.tests.scripted import Step
from services.recipe.tests.test_keys import entry, file_of

pytestmark = pytest.mark.asyncio


async def test_a_background_response_is_its_callers(tmp_path: Path, folder: Path) -> None:
    """It takes one of the key's places until it ends, and is recorded then."""
    key, made = entry(max_concurrency=1, priority=3, allowed_retentions=["agent"])
    keys_file = tmp_path / "keys.json"
    keys_file.write_bytes(file_of(made))
    settings: dict[str, Any] = {"keys_file": str(keys_file), "state_url": f"sqlite:///{tmp_path / 'state.sqlite3'}"}
    headers = {"x-api-key": key, "x-fathom-retention": "agent"}
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "background": True}
    async with serve_recipe(lambda _: [Step([40], after=1), Step([2], finish=1)], folder, **settings) as recipe:

        def num_done() -> float:
            labels = {"tenant": "acme", "key": made["id"], "outcome": "done"}
            return recipe.service.metrics.get_sample_value("fathom_recipe_usage_requests_total", labels) or 0.0

        created = await recipe.post("/v1/responses", asked, headers=headers)
        await recipe.until(lambda: bool(recipe.entrypoint.submitted))
        while_running = await recipe.post("/v1/responses", asked, headers=headers)
        await recipe.until(lambda: num_done() == 1)
        after = await recipe.post("/tokenize", {"prompt": "hi"}, headers=headers)
        request = recipe.entrypoint.submitted[0]

    assert [200, 429, 200] == [answer.status_code for answer in (created, while_running, after)]
    assert ("acme", 3, RetentionClass.RETENTION_CLASS_AGENT) == (request.tenant, request.priority, request.retention)
