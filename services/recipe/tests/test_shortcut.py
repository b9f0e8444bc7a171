"""Do requests that go past the framework get what they would get from it?"""

import re
from functools import partial
from typing import Any

import orjson
import pytest
from starlette.types import Receive, Scope, Send

from proto.common_pb2 import Request
from services.chassis import errors
from services.recipe.app import Shortcut
from services.recipe.tests.running import Running
from services.recipe.tests.scripted import Step, saying
from services.recipe.tests.test_refusals import BAD_CHAT, BAD_TEXT, CHAT, TEXT

pytestmark = pytest.mark.asyncio(loop_scope="session")

ITEMS, MESSAGE = {"model": "tiny", "input": "hi"}, CHAT | {"max_tokens": 4}
POSTS: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "/v1/chat/completions": (CHAT, BAD_CHAT[::9]),
    "/v1/completions": (TEXT, BAD_TEXT[::4]),
    "/v1/responses": (ITEMS, [({"input": 5}, ""), ({"store": True}, ""), ({"x": 1}, "")]),
    "/v1/responses/input_tokens": (ITEMS, [({"input": None}, ""), ({"x": 1}, "")]),
    "/v1/messages": (MESSAGE, [({"max_tokens": 0}, ""), ({"system": 1}, ""), ({"model": "none"}, "")]),
    "/v1/messages/count_tokens": (CHAT, [({"messages": []}, ""), ({"max_tokens": 1}, "")]),
    "/tokenize": ({"prompt": "hi"}, [({"prompt": 5}, ""), ({"messages": []}, "")]),
    "/detokenize": ({"tokens": [40]}, [({"tokens": [-1]}, ""), ({"tokens": "x"}, "")]),
}
NO_OBJECTS = (b"{", b"null", b'{"n": 1, "n": 2}', b"[" * 5000)
LOST = errors.to_stream_error(errors.NoReplica("nobody there"))
RANDOM = re.compile("[0-9a-f]{32}")
CHANGING = ("x-request-id", "request-id", "date")


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


def _steps(steps: list[Step], _request: Request) -> list[Step]:
    return steps


async def answers(recipe: Running) -> list[tuple[Any, ...]]:
    """What all endpoints say to bodies good and bad, to failures before and after the first token, and to headers."""
    told: list[tuple[Any, ...]] = []

    async def ask(path: str, body: bytes, **headers: str) -> None:
        raw = await recipe.http.post(path, content=body, headers=headers)
        kept = {name: value for name, value in raw.headers.items() if name not in CHANGING}
        ids = [name in raw.headers for name in CHANGING]
        text = "" if raw.is_success else RANDOM.sub("id", raw.text)
        told.append((path, body[:200], raw.status_code, kept, ids, text))

    for path, (good, changes) in POSTS.items():
        recipe.play(saying([40, 41], eos=2))
        for body in (good, *(good | change for change, _param in changes)):
            await ask(path, orjson.dumps(body))
        for text in NO_OBJECTS:
            await ask(path, text)
        await ask(path, orjson.dumps(good), **{"x-fathom-retention": "never", "x-request-id": "mine"})
        await ask(path, orjson.dumps(good), **{"idempotency-key": "x" * 256})
        for steps in ([Step(error=LOST)], [Step([40]), Step(error=LOST)]):
            recipe.play(partial(_steps, steps))
            for stream in ({}, {"stream": True}):
                await ask(path, orjson.dumps(good | stream))
    return told


def _given(steps: list[Step], _request: object) -> list[Step]:
    return steps


async def test_past_the_framework_nothing_differs(recipe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status, headers and errors are those of the ordinary way."""
    short = await answers(recipe)

    async def ordinary(self: Shortcut, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    monkeypatch.setattr(Shortcut, "__call__", ordinary)

    for ours, theirs in zip(short, await answers(recipe), strict=True):
        assert theirs == ours
