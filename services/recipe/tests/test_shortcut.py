"""Do requests that go past the framework get what they would get from it?"""

import pytest

from services.recipe.tests.running import Running
from services.recipe.tests.scripted import saying

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_other_methods_and_paths_are_refused_as_ever(recipe: Running) -> None:
    """With the allow header, and in the API's own shape."""
    wrong = await recipe.http.get("/v1/chat/completions")
    slash = await recipe.post("/v1/chat/completions/", CHAT)
    other = await recipe.http.put("/v1/messages", json={})

    assert [405, 404, 405] == [answer.status_code for answer in (wrong, slash, other)]
    assert "POST" == wrong.headers["allow"]
    assert "not_found_error" != wrong.json()["error"]["type"]
    assert "error" == other.json()["type"]


async def test_an_endpoint_has_its_errors_and_ids(recipe: Running) -> None:
    """There is nobody left to add them."""
    recipe.play(saying([40], eos=2))
    good = await recipe.post("/v1/chat/completions", CHAT, headers={"x-request-id": "mine"})
    bad = await recipe.http.post("/v1/chat/completions", content=b"{", headers={"x-request-id": "mine"})
    counted = await recipe.post("/tokenize", {"prompt": "hi", "messages": []})

    assert [200, 400, 400] == [answer.status_code for answer in (good, bad, counted)]
    assert ["mine", "mine"] == [answer.headers["x-request-id"] for answer in (good, bad)]
    assert "invalid_json" == bad.json()["error"]["code"]
