"""Promises to holders of keys, and to everybody else, through the official clients: cases 56, 59, 110 and 112."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from proto.common_pb2 import RetentionClass
from services.recipe import keys_watch
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.scripted import Step, saying
from services.recipe.tests.test_keys import entry, file_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": HELLO}


class Locked:
    """A recipe with keys; `make` adds one and returns it as its holder has it."""

    def __init__(self, running: Running, path: Path) -> None:
        self.running = running
        self._path = path
        self._entries: list[dict[str, Any]] = []
        self._http = anthropic.DefaultAsyncHttpxClient()

    async def make(self, **fields: Any) -> str:
        whole, made = entry(**fields)
        self._entries.append(made)
        await self._write(whole, 404)
        return whole

    async def revoke(self, whole: str) -> None:
        self._entries = [made for made in self._entries if not whole.startswith(f"sk-{made['id']}_")]
        await self._write(whole, 401)

    async def _write(self, whole: str, status: int) -> None:
        self._path.write_bytes(file_of(*self._entries))
        async with asyncio.timeout(20):
            # There is no such path, so it costs no token; but it is a request.
            while (await self.get("/nothing", whole)).status_code != status:  # noqa: ASYNC110 - another task reads the file
                await asyncio.sleep(0.01)

    async def get(self, path: str, key: str) -> httpx.Response:
        return await self.running.http.get(path, headers={"x-api-key": key})

    async def chat(self, key: str, change: dict[str, Any] | None = None, **headers: Any) -> httpx.Response:
        bearer = {"authorization": f"Bearer {key}"}
        return await self.running.post("/v1/chat/completions", CHAT | (change or {}), headers=bearer | headers)

    def openai(self, key: str, *, max_retries: int = 0) -> openai.AsyncOpenAI:
        return self.running.sdk.with_options(api_key=key, max_retries=max_retries)

    def anthropic(self, **credentials: Any) -> anthropic.AsyncAnthropic:
        # Their client's own HTTP client, but one for all: making one takes a tenth of a second.
        options: dict[str, Any] = {"base_url": self.running.url, "max_retries": 0, "http_client": self._http}
        return anthropic.AsyncAnthropic(**options, **credentials)

    def counted(self, name: str, **labels: str) -> float:
        return self.running.service.metrics.get_sample_value(name, labels) or 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving_locked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Locked]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_bytes(file_of())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_watch, "POLL_SECONDS", 0.01)
        async with serve_recipe(lambda _request: (), folder, keys_file=str(path)) as running:
            yield Locked(running, path)


@pytest.fixture
def locked(serving_locked: Locked) -> Locked:
    serving_locked.running.play(saying([40, 41], eos=2))
    return serving_locked


class TestWho:
    async def test_strangers_are_refused_in_their_protocols_words(self, locked: Locked) -> None:
        """401 with no key and with a wrong one, as the clients' own error; nothing reaches the engines."""
        for key in ("none", "sk-abc_" + "x" * 43):
            answer = await locked.chat(key)
            assert (401, "Bearer") == (answer.status_code, answer.headers["www-authenticate"])
            assert ("authentication_error", "invalid_api_key") == (
                answer.json()["error"]["type"],
                answer.json()["error"]["code"],
            )
            assert key not in answer.text
        assert "x-api-key" in (await locked.running.post("/v1/chat/completions", CHAT)).json()["error"]["message"]
        with pytest.raises(openai.AuthenticationError):
            await locked.openai("none").models.list()
        with pytest.raises(anthropic.AuthenticationError) as raised:
            await locked.anthropic(api_key="none").messages.create(model="tiny", max_tokens=5, messages=HELLO)

        told: Any = raised.value.body
        assert {"type", "error", "request_id"} == set(told)
        assert "authentication_error" == told["error"]["type"]
        assert raised.value.request_id
        assert [] == locked.running.entrypoint.submitted

    async def test_all_but_health_needs_a_key(self, locked: Locked) -> None:
        """Paths that do not exist as well; probes have no keys."""
        for path in ("/v1/models", "/v1/models/tiny", "/v1/nothing", "/", "/tokenize", "/health/", "//health"):
            assert 401 == (await locked.running.http.get(path)).status_code, path

        assert 200 == (await locked.running.http.get("/health")).status_code

    async def test_both_ways_to_send_a_key_work_everywhere(self, locked: Locked) -> None:
        """Bearer and x-api-key, and both at once when one is right: clients with two settings send two."""
        key = await locked.make()
        said = await locked.openai(key).chat.completions.create(model="tiny", messages=HELLO)
        for credentials in ({"api_key": key}, {"auth_token": key}):
            message = await locked.anthropic(**credentials).messages.create(model="tiny", max_tokens=5, messages=HELLO)
            assert said.choices[0].message.content == message.content[0].text  # type: ignore[union-attr]
        mixed = [
            {"x-api-key": "none", "Authorization": f"bearer {key}"},
            {"x-api-key": key, "Authorization": "Basic eA=="},
        ]
        statuses = [
            (await locked.running.post("/v1/chat/completions", CHAT, headers=both)).status_code for both in mixed
        ]

        assert [200, 200] == statuses

    async def test_a_revoked_key_ends_and_answers_under_way_do_not(self, locked: Locked) -> None:
        """Without a restart."""
        key = await locked.make()
        locked.running.play(saying([40] * 30, eos=2, after=0.01))
        running = asyncio.create_task(locked.chat(key))
        await locked.running.until(lambda: bool(locked.running.entrypoint.submitted))
        await locked.revoke(key)

        assert 401 == (await locked.chat(key)).status_code
        assert 200 == (await running).status_code

    async def test_the_tenant_comes_from_the_key_alone(self, locked: Locked) -> None:
        """With priority, on every choice; what the caller claims to be is refused or ignored."""
        key = await locked.make(tenant="acme", priority=7)
        evil: dict[str, Any] = {"x-tenant-id": "evil", "x-fathom-tenant": "evil", "x-priority": "99"}
        await locked.chat(key, {"n": 2}, **evil)
        claimed = await locked.chat(key, {"tenant": "evil"})

        assert [("acme", 7)] * 2 == [(r.tenant, r.priority) for r in locked.running.entrypoint.submitted]
        assert (400, "tenant") == (claimed.status_code, claimed.json()["error"]["param"])

    async def test_a_key_is_for_its_models(self, locked: Locked) -> None:
        """403 for others, which it does not see in the list either; a model nobody serves is a 404 for all."""
        key, narrow = await locked.make(), await locked.make(models=["other"])
        refused = await locked.chat(narrow)
        with pytest.raises(openai.PermissionDeniedError):
            await locked.openai(narrow).models.retrieve("tiny")
        with pytest.raises(anthropic.PermissionDeniedError) as raised:
            await locked.anthropic(api_key=narrow).messages.create(model="tiny", max_tokens=5, messages=HELLO)
        with pytest.raises(openai.NotFoundError):
            await locked.openai(key).models.retrieve("gpt-9")
        with pytest.raises(anthropic.NotFoundError):
            await locked.anthropic(api_key=key).models.retrieve("gpt-9")

        assert (403, "permission_error") == (refused.status_code, refused.json()["error"]["type"])
        assert "permission_error" == raised.value.body["error"]["type"]  # type: ignore[index]
        assert [1, 0] == [len((await locked.openai(k).models.list()).data) for k in (key, narrow)]
        assert 0 == len((await locked.anthropic(api_key=narrow).models.list()).data)
        assert [] == locked.running.entrypoint.submitted

    async def test_retention_is_asked_for_within_what_the_key_allows(self, locked: Locked) -> None:
        """Its own always; another if listed; else 403, and 400 for what does not exist."""
        chat, agent = await locked.make(), await locked.make(retention="agent", allowed_retentions=["chat"])
        asked = [(key, kept) for key in (chat, agent) for kept in ("chat", "agent", "forever")]
        statuses = [(await locked.chat(key, {}, **{"x-fathom-retention": kept})).status_code for key, kept in asked]

        refused = (await locked.chat(chat, {}, **{"x-fathom-retention": "agent"})).json()["error"]
        unknown = (await locked.chat(chat, {}, **{"x-fathom-retention": "forever"})).json()["error"]

        assert [200, 403, 400, 200, 200, 400] == statuses
        assert ["x-fathom-retention"] * 2 == [refused["param"], unknown["param"]]

    async def test_retention_travels_with_every_request(self, locked: Locked) -> None:
        """The key's class, or the one asked for, in all APIs and on every choice."""
        key = await locked.make(retention="agent", allowed_retentions=["chat"])
        await locked.chat(key, {"n": 2})
        chat, header = locked.openai(key), {"x-fathom-retention": "chat"}
        await chat.responses.create(model="tiny", input="hi", store=False, extra_headers=header)
        messages = locked.anthropic(api_key=key).messages
        await messages.create(model="tiny", max_tokens=5, messages=HELLO, extra_headers=header)
        await messages.create(model="tiny", max_tokens=5, messages=HELLO)
        submitted = locked.running.entrypoint.submitted

        names = [RetentionClass.Name(request.retention).rpartition("_")[2].lower() for request in submitted]
        assert ["agent", "agent", "chat", "chat", "agent"] == names


class TestHowMuch:
    async def test_requests_per_minute(self, locked: Locked) -> None:
        """The one too many is a 429 with retry-after and headers that count down; other keys are not concerned."""
        key, other = await locked.make(requests_per_minute=4), await locked.make()
        answers = [await locked.chat(key) for _ in range(4)]  # one was used up by `make`
        refused = answers[-1]

        assert [200, 200, 200, 429] == [answer.status_code for answer in answers]
        assert ["4"] * 4 == [answer.headers["x-ratelimit-limit-requests"] for answer in answers]
        assert ["2", "1", "0", "0"] == [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert re.fullmatch(r"\d+\.\d{3}s", refused.headers["x-ratelimit-reset-requests"])
        assert 1 <= int(refused.headers["retry-after"]) <= 15
        assert ("rate_limit_error", "rate_limit_exceeded") == (
            refused.json()["error"]["type"],
            refused.json()["error"]["code"],
        )
        assert 200 == (await locked.chat(other)).status_code
        assert 3 + 1 == len(locked.running.entrypoint.submitted)
        assert 1 == locked.counted("fathom_recipe_refused_total", tenant="acme", key=key[3:15], reason="requests")

    @pytest.mark.slow
    async def test_the_official_clients_wait_and_try_again(self, locked: Locked) -> None:
        """60 a minute: the 61st request is answered a second later, by the client's own retry."""
        key = await locked.make(requests_per_minute=60)
        while (await locked.get("/nothing", key)).status_code == 404:
            pass
        said = await locked.openai(key, max_retries=2).chat.completions.create(model="tiny", messages=HELLO)

        assert said.choices[0].message.content

    async def test_input_tokens_are_counted_as_the_model_counts_them(self, locked: Locked) -> None:
        """Once a prompt, whatever n is; too many for now say when, too many for ever say that trying is no use."""
        key = await locked.make(input_tokens_per_minute=300)
        first = await locked.chat(key, {"n": 2})
        used = first.json()["usage"]["prompt_tokens"]
        words = 300 - used
        full = await locked.running.post(
            "/v1/completions",
            {"model": "tiny", "prompt": [5] * words},
            headers={"x-api-key": key},
        )
        later = await locked.chat(key)
        never = await locked.running.post(
            "/v1/completions", {"model": "tiny", "prompt": [5] * 301}, headers={"x-api-key": key}
        )

        assert str(300 - used) == first.headers["x-ratelimit-remaining-input-tokens"]
        assert [200, 200, 429, 429] == [answer.status_code for answer in (first, full, later, never)]
        assert 1 <= int(later.headers["retry-after"]) <= 61
        assert "x-should-retry" not in later.headers
        assert 2 == locked.counted("fathom_recipe_refused_total", tenant="acme", key=key[3:15], reason="input_tokens")

    async def test_a_prompt_above_the_whole_limit_is_not_tried_again(self, locked: Locked) -> None:
        """The client raises at once instead of waiting for what cannot come."""
        key = await locked.make(input_tokens_per_minute=5)
        answer = await locked.chat(key)
        with pytest.raises(openai.RateLimitError):
            async with asyncio.timeout(20):
                await locked.openai(key, max_retries=5).chat.completions.create(model="tiny", messages=HELLO)

        assert ("false", False) == (answer.headers["x-should-retry"], "retry-after" in answer.headers)
        assert [] == locked.running.entrypoint.submitted

    async def test_output_tokens_are_counted_as_they_stream(self, locked: Locked) -> None:
        """An answer goes on to its end; the debt is then the next request's to wait for, before any work."""
        key = await locked.make(output_tokens_per_minute=10)
        locked.running.play(saying([40] * 20, eos=2))
        stream = await locked.openai(key).chat.completions.create(model="tiny", messages=HELLO, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        refused = await locked.chat(key)

        assert 20 == len(text)
        assert (429, "0") == (refused.status_code, refused.headers["x-ratelimit-remaining-output-tokens"])
        assert 60 <= int(refused.headers["retry-after"]) <= 75
        assert 1 == len(locked.running.entrypoint.submitted)

    async def test_anthropic_callers_read_their_own_headers(self, locked: Locked) -> None:
        """429 as rate_limit_error, limits in anthropic-ratelimit-*, the moment of reset as a date."""
        key = await locked.make(requests_per_minute=2, output_tokens_per_minute=1000)
        client = locked.anthropic(api_key=key)
        raw = await client.messages.with_raw_response.create(model="tiny", max_tokens=5, messages=HELLO)
        with pytest.raises(anthropic.RateLimitError) as raised:
            await client.messages.create(model="tiny", max_tokens=5, messages=HELLO)

        assert ("2", "0", "1000") == tuple(
            raw.headers[f"anthropic-ratelimit-{name}"]
            for name in ("requests-limit", "requests-remaining", "tokens-limit")
        )
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", raw.headers["anthropic-ratelimit-requests-reset"])
        assert "rate_limit_error" == raised.value.body["error"]["type"]  # type: ignore[index]
        assert raised.value.response.headers["retry-after"]

    async def test_requests_at_once(self, locked: Locked) -> None:
        """As many as allowed; a place is free again when an answer ends, well or not."""
        key = await locked.make(max_concurrency=2)
        pauses = iter([1, 1, 0])
        locked.running.play(lambda _request: [Step([40], after=next(pauses)), Step([2], finish=1)])
        running = [asyncio.create_task(locked.chat(key)) for _ in range(2)]
        await locked.running.until(lambda: len(locked.running.entrypoint.submitted) == 2)
        third = await locked.chat(key)
        running[0].cancel()
        await locked.running.until(lambda: len(locked.running.entrypoint.cancelled) == 1)
        fourth, second = await locked.chat(key), await running[1]

        assert [429, 200, 200] == [answer.status_code for answer in (third, fourth, second)]
        assert "1" == third.headers["retry-after"]


class TestWhatWasUsed:
    async def test_a_record_for_each_request(self, locked: Locked, capsys: pytest.CaptureFixture[str]) -> None:
        """In the log with ids and counts, in the metrics by tenant and key; prompts count once, and no text is there."""
        key = await locked.make(tenant="used")
        locked.running.entrypoint.cached_tokens = 4
        said = (await locked.chat(key, {"n": 2})).json()["usage"]
        labels = {"tenant": "used", "key": key[3:15]}
        counted = {
            kind: locked.counted("fathom_recipe_usage_tokens_total", kind=kind, **labels)
            for kind in ("input", "cached", "output", "reasoning")
        }
        line = next(line for line in capsys.readouterr().out.splitlines() if "recipe.usage" in line)

        assert {
            "input": said["prompt_tokens"],
            "cached": 4,
            "output": said["completion_tokens"],
            "reasoning": 0,
        } == counted
        assert 1 == locked.counted("fathom_recipe_usage_requests_total", outcome="done", **labels)
        for told in ("tenant=used", f"key={key[3:15]}", f"input_tokens={said['prompt_tokens']}", "outcome=done"):
            assert told in line
        assert key not in line

    async def test_what_was_used_by_a_caller_who_left_counts_too(self, locked: Locked) -> None:
        """As cancelled, with the tokens that came."""
        key = await locked.make(tenant="gone")
        labels = {"tenant": "gone", "key": key[3:15]}
        locked.running.play(lambda _request: [Step([40]), Step([41], after=30)])
        stream: dict[str, Any] = {"json": CHAT | {"stream": True}, "headers": {"x-api-key": key}}
        async with locked.running.http.stream("POST", "/v1/chat/completions", **stream) as response:
            await anext(response.aiter_bytes())
        await locked.running.until(
            lambda: locked.counted("fathom_recipe_usage_requests_total", outcome="cancelled", **labels) == 1
        )

        assert 1 == locked.counted("fathom_recipe_usage_tokens_total", kind="output", **labels)


async def test_without_keys_everybody_is_nobody(recipe: Running) -> None:
    """Any key or none; no tenant, no limits told; KV is a chat's, or what was asked for: nobody's store is another's."""
    recipe.play(saying([40], eos=2))
    answer = await recipe.post("/v1/chat/completions", CHAT, headers={"authorization": "Bearer sk-whatever"})
    await recipe.post("/v1/chat/completions", CHAT, headers={"x-fathom-retention": "agent"})
    first, second = recipe.entrypoint.submitted

    assert 200 == answer.status_code
    assert ("", 0) == (first.tenant, first.priority)
    assert (RetentionClass.RETENTION_CLASS_CHAT, RetentionClass.RETENTION_CLASS_AGENT) == (
        first.retention,
        second.retention,
    )
    assert not [name for name in answer.headers if "ratelimit" in name]
    assert json.loads(answer.text)
