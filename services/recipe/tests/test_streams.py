"""Promises about what happens while an answer is under way: breaks, disconnects, silence, drain."""

import asyncio
import functools
import json
import time
from typing import Any

import httpx
import pytest
from openai import APIError

from services.chassis import errors, telemetry
from services.chassis.testing import OtlpReceiver
from services.recipe import server
from services.recipe.generating import Front
from services.recipe.tests.running import Running, Starter
from services.recipe.tests.scripted import LENGTH, Step, saying

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}


def slow(_request: Any) -> Any:
    """A hundred tokens, one each 20 ms."""
    yield from (Step([40 + i % 20], after=0.02) for i in range(100))
    yield Step(finish=LENGTH)


class TestShared:
    pytestmark = pytest.mark.asyncio(loop_scope="session")

    async def test_an_error_after_the_beginning_is_a_frame_without_done(self, recipe: Running) -> None:
        """The official client raises, and no [DONE] claims success."""
        lost = errors.to_stream_error(errors.PeerLost("decode-0 is gone"))
        recipe.play(lambda _request: [Step([40]), Step([41]), Step(error=lost)])
        raw = (await recipe.post("/v1/chat/completions", STREAM)).text
        with pytest.raises(APIError, match="decode-0 is gone"):
            async for _chunk in await recipe.sdk.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            ):
                pass

        last = json.loads(raw.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "service_unavailable" == last["error"]["code"]
        assert "[DONE]" not in raw

    async def test_a_disconnect_cancels_a_stream(self, recipe: Running) -> None:
        """Promptly, every choice, by name."""
        recipe.play(slow)
        async with recipe.http.stream("POST", "/v1/chat/completions", json=STREAM | {"n": 2}) as response:
            await anext(response.aiter_bytes())
        await recipe.until(lambda: len(recipe.entrypoint.cancelled) == 2)

        assert {"disconnect"} == {reason for _id, reason in recipe.entrypoint.cancelled}

    @pytest.mark.parametrize("script", [slow, lambda _request: [Step([40], after=30)]])
    async def test_a_disconnect_cancels_a_whole_answer(self, recipe: Running, script: Any) -> None:
        """Also before the first token, when prefill is at work."""
        recipe.play(script)
        asking = asyncio.create_task(recipe.http.post("/v1/chat/completions", json=CHAT))
        await recipe.until(lambda: bool(recipe.entrypoint.submitted))
        asking.cancel()
        await recipe.until(lambda: len(recipe.entrypoint.cancelled) == 1)

        assert "disconnect" == recipe.entrypoint.cancelled[0][1]

    async def test_requests_run_beside_each_other(self, recipe: Running) -> None:
        """Eight streams share one gRPC stream and get their own tokens."""
        recipe.play(lambda request: saying(list(request.prompt_token_ids), eos=2, after=0.001)(request))
        prompts = [[40 + i] * 20 for i in range(8)]
        bodies = [{"model": "tiny", "prompt": p, "return_token_ids": True} for p in prompts]
        answers = await asyncio.gather(*(recipe.post("/v1/completions", body) for body in bodies))

        assert [[*p, 2] for p in prompts] == [answer.json()["choices"][0]["token_ids"] for answer in answers]


@pytest.mark.slow
async def test_silence_is_filled_with_comments(serving: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first token; the client sees an ordinary answer."""
    monkeypatch.setattr(server, "Front", functools.partial(Front, ping_seconds=0.05))
    async with serving(lambda _request: [Step([40], after=0.3), Step([41], finish=LENGTH)]) as recipe:
        began = time.monotonic()
        raw = (await recipe.post("/v1/chat/completions", STREAM)).text
        took = time.monotonic() - began

    assert raw.startswith(": ping\n\n")
    assert 1 <= raw.count(": ping\n\n") <= took / 0.05
    assert raw.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_a_lost_entrypoint_ends_streams_and_comes_back(serving: Starter) -> None:
    """Streams under way end with an error at once; the next request works again."""
    async with serving(slow) as recipe:
        async with recipe.http.stream("POST", "/v1/chat/completions", json=STREAM) as response:
            lines = response.aiter_text()
            await anext(lines)
            recipe.entrypoint.break_streams.set()
            rest = "".join([text async for text in lines])
        recipe.entrypoint.break_streams.clear()
        recipe.entrypoint.script = saying([40])
        again = await recipe.post("/v1/chat/completions", CHAT)

    assert "service_unavailable" in rest
    assert "[DONE]" not in rest
    assert 200 == again.status_code


async def refuses(url: str) -> bool:
    """Tell whether nobody listens; who is hung up on was let in before."""
    async with httpx.AsyncClient() as late:
        try:
            await late.get(f"{url}/health")
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            pass
    return False


@pytest.mark.slow
async def test_drain_lets_running_answers_finish(serving: Starter) -> None:
    """New connections are refused, the stream that runs is not cut."""
    async with serving(saying([40] * 30, eos=2, after=0.01)) as recipe:
        async with recipe.http.stream("POST", "/v1/chat/completions", json=STREAM) as response:
            lines = response.aiter_text()
            await anext(lines)
            stopping = asyncio.create_task(recipe.service.shut_down())
            async with asyncio.timeout(30):
                while not await refuses(recipe.url):  # noqa: ASYNC110 - the listener closes a moment later
                    await asyncio.sleep(0.01)
            rest = "".join([text async for text in lines])
        await stopping

    assert rest.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_the_end_of_drain_is_told(serving: Starter, caplog: pytest.LogCaptureFixture) -> None:
    """A stream ends with an error frame, a whole answer with a 503; neither breaks off, and the log has no traceback."""
    async with serving(lambda _request: [Step([40]), Step([41], after=30)], drain_seconds=2) as recipe:
        whole = asyncio.create_task(recipe.post("/v1/chat/completions", CHAT))
        async with recipe.http.stream("POST", "/v1/chat/completions", json=STREAM | {"n": 2}) as response:
            lines = response.aiter_text()
            await anext(lines)
            await recipe.until(lambda: len(recipe.entrypoint.submitted) == 3)
            stopping = asyncio.create_task(recipe.service.shut_down())
            rest = "".join([text async for text in lines])
        answer = await whole
        await stopping

    assert "shutting down" in rest.strip().split("\n\n")[-1]
    assert "[DONE]" not in rest
    assert (503, "service_unavailable") == (answer.status_code, answer.json()["error"]["code"])
    assert "Traceback" not in caplog.text


@pytest.mark.slow
async def test_an_entrypoint_that_is_away_is_a_503(serving: Starter) -> None:
    """Health and requests say so; nothing hangs."""
    async with serving(saying([40]), entrypoint_address="127.0.0.1:1") as recipe:
        health = await recipe.http.get("/health")
        answer = await recipe.post("/v1/chat/completions", CHAT)

    assert (503, 503) == (health.status_code, answer.status_code)
    assert "service_unavailable" == answer.json()["error"]["code"]
    assert "retry-after" in answer.headers


async def test_the_trace_goes_through(serving: Starter) -> None:
    """The caller's traceparent is the parent of our span, and ours is what the entrypoint gets."""
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with OtlpReceiver() as receiver:
        telemetry.setup("recipe", "recipe-0", receiver.endpoint)
        try:
            async with serving(saying([40], eos=2)) as recipe:
                await recipe.post("/v1/chat/completions", CHAT | {"seed": 3}, headers={"traceparent": caller})
                request = recipe.entrypoint.submitted[0]
                spans = await receiver.wait_for(lambda spans: any(span.name == "chat tiny" for span in spans))
        finally:
            await asyncio.to_thread(telemetry.shutdown)
    span = next(span for span in spans if span.name == "chat tiny")

    assert ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331") == (span.trace_id, span.parent_id)
    assert request.traceparent == f"00-{span.trace_id}-{span.span_id}-01"
    assert ("chat", "tiny", 3) == tuple(
        span.attributes[f"gen_ai.{name}"] for name in ("operation.name", "request.model", "request.seed")
    )
    assert (2, ["stop"]) == (
        span.attributes["gen_ai.usage.output_tokens"],
        span.attributes["gen_ai.response.finish_reasons"],
    )
