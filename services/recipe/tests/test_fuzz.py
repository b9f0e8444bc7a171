"""Promises to whoever sends anything: no 5xx, small errors in the right shape, nothing left running, and soon."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from proto.common_pb2 import ModelCard
from services.recipe.tests.deepseek import write_folder
from services.recipe.tests.fuzz import LIMITS, Ask, asks
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.speaking import answering

pytestmark = pytest.mark.slow

IDS = re.compile(rb'"(?:resp|conv|msg|fc|rs|fco)_[A-Za-z0-9]+"')


class Fuzz:
    """Sends what is made up, and looks at what comes back. ids: what was seen to be there."""

    def __init__(self, http: httpx.AsyncClient, described: Any, model: str) -> None:
        self._http = http
        self._described = described
        self._model = model
        self.ids: list[str] = ["resp_1"]
        self.statuses: dict[int, int] = {}
        self.num_left = 0

    async def run(self, number: int, count: int) -> None:
        """Send `count` requests, four at a time; the same number makes up the same ones."""
        made: list[Ask] = []

        @seed(number)
        @settings(
            max_examples=count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate],
        )
        @given(asks(self._described, self._model, tuple(self.ids)))
        def collect(ask: Ask) -> None:
            made.append(ask)

        await asyncio.to_thread(collect)
        for at in range(0, len(made), 4):
            await asyncio.gather(*map(self._send, made[at : at + 4]))

    async def _send(self, ask: Ask) -> None:
        try:
            raw = await self._http.request(ask.method, ask.path, content=ask.body, headers=ask.headers)
        except httpx.InvalidURL:
            return
        except httpx.ReadTimeout:
            # Whoever set no limit may get a very long answer, and this caller leaves; nobody else has to wait.
            self.num_left += 1
            asked = json.loads(ask.body or b"{}")
            assert "model" in asked, ask
            limits = [asked[name] for name in LIMITS if asked.get(name) is not None]  # null is no limit
            assert not any(0 < limit <= 4 for limit in limits), ask
            return
        self.statuses[raw.status_code] = self.statuses.get(raw.status_code, 0) + 1
        assert raw.status_code < 500, (ask, raw.text)
        if raw.status_code == 200:
            self.ids += [found.decode().strip('"') for found in IDS.findall(raw.content)][:4]
            if b"text/event-stream" in raw.headers.get("content-type", "").encode():
                # An answer that has begun can only fail inside.
                assert b'"server_error"' not in raw.content, (ask, raw.text[-2000:])
                assert b'"api_error"' not in raw.content, (ask, raw.text[-2000:])
            return
        assert len(raw.content) < 8192, ask
        error = json.loads(raw.content)["error"]
        assert error["message"], ask


async def until_idle(recipe: Running) -> None:
    """Wait for the end of what still runs in the background."""
    await recipe.until(lambda: all(task.done() for task in recipe.entrypoint.running.values()), seconds=30)


async def test_made_up_requests_are_answered_or_refused(tmp_path: Path) -> None:
    """Three hundred of them, with state; the long run is with a real model, in e2e."""
    folder = write_folder(tmp_path / "deep")
    card = ModelCard(name="deep", context_tokens=4096, takes_images=True)
    state_url = f"sqlite:///{tmp_path / 'state.sqlite3'}"
    async with serve_recipe(answering("hm</think>ok"), folder, card=card, state_url=state_url) as recipe:
        described = (await recipe.http.get("/openapi.json")).json()
        fuzz = Fuzz(recipe.http, described, "deep")
        for number in range(3):
            await fuzz.run(number, 100)
        await until_idle(recipe)
        page = (await recipe.http.get("/health")).status_code

    assert 200 == page
    assert fuzz.statuses[200] > 30, fuzz.statuses
    assert fuzz.statuses[400] > 30, fuzz.statuses


NESTED = "[" * 5000 + "]" * 5000
DEEP: Any = {"type": "object"}
for _level in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BOMBS: dict[str, Any] = {
    "many optional properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    "deep": DEEP,
    "long strings": {"type": "string", "maxLength": 20_000},
    "long strings of a pattern": {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,40}$"} for i in range(200)}},
    "doubling": {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}, "$ref": "#/$defs/d0"},
    "repeated repeats": {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    "a state for every subset": {"type": "string", "pattern": "[ab]*a[ab]{13}"},
    "many choices": {"enum": [f"value {i}" for i in range(20_000)]},
    "itself": {"$ref": "#"},
    "many of one": {"allOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(500)]},
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_nesting_and_size(deep: Running, path: str) -> None:
    """5,000 brackets and 50 MB: a 4xx for less than a second of work, the client's own counted in, and no memory."""
    nested = b'{"model": "deep", "messages": ' + NESTED.encode() + b', "input": ' + NESTED.encode() + b"}"
    for body, status in ((nested, 400), (b'{"model": "' + b"x" * (50 << 20) + b'"}', 413)):
        began, before = time.process_time(), psutil.Process().memory_info().rss
        raw = await deep.http.post(path, content=body)
        assert status == raw.status_code
        assert len(raw.content) < 8192
        assert time.process_time() - began < 1
        # The client is this process too and may copy the body once, to send it: a server that keeps it is a second copy.
        assert psutil.Process().memory_info().rss - before < 80 << 20


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", BOMBS, ids=lambda name: name.replace(" ", "-"))
async def test_schema_bombs(deep: Running, name: str) -> None:
    """Refused, or compiled after all, within a second of work; and this process stays as small as it was."""
    deep.play(answering("</think>ok"))
    schema = {"type": "object", "properties": {"x": BOMBS[name]}} if name not in {"itself", "doubling"} else BOMBS[name]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "deep", "messages": [{"role": "user", "content": "x"}], "response_format": form}
    await deep.post("/v1/chat/completions", body | {"response_format": {"type": "json_object"}})  # workers are up
    before = psutil.Process().memory_info().rss
    took = []
    for _try in range(3):
        began = time.perf_counter()
        raw = await deep.post("/v1/chat/completions", body)
        took.append(time.perf_counter() - began)
        assert raw.status_code in {200, 400}, raw.text
        assert 200 == raw.status_code or len(raw.content) < 8192
    grown = psutil.Process().memory_info().rss - before

    assert min(took) < 1, took
    assert grown < 64 << 20
    assert (
        200
        == (
            await deep.post("/v1/chat/completions", {k: v for k, v in body.items() if k != "response_format"})
        ).status_code
    )
