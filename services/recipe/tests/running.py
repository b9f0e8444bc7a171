"""How do tests run a whole recipe? On a free port, before a scripted entrypoint, with two clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from proto import entrypoint_pb2_grpc
from proto.common_pb2 import ModelCard
from services.chassis import testing
from services.chassis.service import Service
from services.recipe.config import RecipeSettings
from services.recipe.server import build
from services.recipe.tests.scripted import Script, ScriptedEntrypoint

_PATIENCE_SECONDS = 60
"""Of clients: a disk that stands still holds up the store of responses, in tests for up to half a minute."""


@dataclass
class Running:
    """A recipe that serves, and what it talks to."""

    url: str
    entrypoint: ScriptedEntrypoint
    service: Service
    http: httpx.AsyncClient
    sdk: AsyncOpenAI

    def play(self, script: Script) -> None:
        """Answer with this script from now on, and forget what came before."""
        self.entrypoint.script = script
        self.entrypoint.cached_tokens = 0
        self.entrypoint.submitted.clear()
        self.entrypoint.cancelled.clear()

    async def until(self, is_so: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait for something that happens on the other side."""
        async with asyncio.timeout(seconds):
            while not is_so():  # noqa: ASYNC110 - what is waited for lies in another task's hands
                await asyncio.sleep(0.005)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)


Starter = Callable[..., AbstractAsyncContextManager[Running]]


@asynccontextmanager
async def serve_recipe(
    script: Script, model: Path, *, card: ModelCard | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """Run a recipe on a free port before an entrypoint that plays `script`.

    card: of the one model served, which the recipe asks for as it starts; None: the tiny one's.
    """
    entrypoint = ScriptedEntrypoint(script)
    if card is not None:
        entrypoint.models[:] = [card]

    def add(server: Any) -> None:
        entrypoint_pb2_grpc.add_EntrypointServicer_to_server(entrypoint, server)

    listen = f"127.0.0.1:{testing.free_port()}"
    url = f"http://{listen}"
    async with testing.serve(add) as address:
        wired: dict[str, Any] = {
            "model": model,
            "entrypoint_address": address,
            "public_listen": listen,
            "nats_url": "nats://127.0.0.1:1",
            "drain_seconds": 5,
        }
        chosen = RecipeSettings(**(wired | settings))
        async with (
            testing.running(chosen, build) as service,
            httpx.AsyncClient(base_url=url, timeout=_PATIENCE_SECONDS) as http,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE_SECONDS) as sdk,
        ):
            yield Running(url, entrypoint, service, http, sdk)
