"""How do the whole-suite tests ask for tokens?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_TIMEOUT = httpx.Timeout(120.0, connect=30.0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """One way to choose tokens, by the public API's names."""

    name: str
    fields: tuple[tuple[str, float], ...]


GREEDY = Sampling("greedy", (("temperature", 0.0),))
SEEDED = Sampling("seeded", (("temperature", 0.8), ("top_p", 0.95), ("seed", 1234)))
BOTH = (GREEDY, SEEDED)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    cached_tokens: int
    usage: tuple[int, int]


async def complete(
    client: httpx.AsyncClient, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling = GREEDY, **extra: Any
) -> Answer:
    """Ask /v1/completions with ids used verbatim; the answer carries the ids back."""
    body = {
        "model": extra.pop("model", await model_name(client)),
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **dict(sampling.fields),
        **extra,
    }
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice, usage = reply.json()["choices"][0], reply.json()["usage"]
    assert list(token_ids) == choice["prompt_token_ids"]
    return Answer(
        tuple(choice["token_ids"]),
        choice["text"],
        choice["finish_reason"],
        usage["prompt_tokens_details"]["cached_tokens"],
        (usage["prompt_tokens"], usage["completion_tokens"]),
    )


async def complete_all(
    base_url: str,
    prompts: Sequence[Sequence[int]],
    *,
    at_once: int,
    max_tokens: int,
    samplings: Sequence[Sampling] = (),
) -> list[Answer]:
    """Ask for all prompts, `at_once` at a time; answers in the prompts' order.  samplings: one each; none is greedy."""
    each = samplings or [GREEDY] * len(prompts)
    gate = asyncio.Semaphore(at_once)

    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT) as client:

        async def one(token_ids: Sequence[int], sampling: Sampling) -> Answer:
            async with gate:
                return await complete(client, token_ids, max_tokens=max_tokens, sampling=sampling)

        return list(await asyncio.gather(*(one(p, s) for p, s in zip(prompts, each, strict=True))))


async def model_name(client: httpx.AsyncClient) -> str:
    """Give the one model's public name."""
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def stream_events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield each SSE data object of one streamed request; stops at [DONE] or the end of the stream."""
    async with client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                if line == "data: [DONE]":
                    return
                yield json.loads(line.removeprefix("data: "))
