"""What does each process say of itself right now?"""

import asyncio
import ssl
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, ValidationError

from services.local.children import nats_answers
from services.local.state import ProcessState, SuiteState

ASK_SECONDS = 1.0
# Nobody is asked over TLS; a client that made its own context would read all root certificates first: 40 ms each time.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
WAITING = "waiting"


class Healthz(BaseModel):
    """The part of a service's /healthz that people watch."""

    ready: bool
    stage: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """One process, seen from outside."""

    process: ProcessState
    ready: bool
    stage: str
    """ "waiting" (for NATS), "starting", "restarting", "not answering", or the service's own word for what it does."""
    done: int = 0
    total: int = 0
    """0: the stage has no known length."""


async def ask_all(suite: SuiteState, *, and_console: bool = False) -> list[Health]:
    """Ask NATS and every service at once, and the console last if wanted; takes at most about a second."""
    asked = suite.everyone if and_console else suite.processes
    async with httpx.AsyncClient(timeout=ASK_SECONDS, trust_env=False, verify=_NO_TLS) as client:
        return list(await asyncio.gather(*(_ask(client, process) for process in asked)))


async def _ask(client: httpx.AsyncClient, process: ProcessState) -> Health:
    if process.identity is None:
        return Health(process, ready=False, stage="restarting" if process.exit_code is not None else WAITING)
    if not process.health_url:
        answers = await asyncio.to_thread(nats_answers, process.address)
        return Health(process, ready=answers, stage="ready" if answers else "starting")
    try:
        reply = Healthz.model_validate_json((await client.get(process.health_url)).content)
    except httpx.ConnectError:
        return Health(process, ready=False, stage="starting")
    except (httpx.HTTPError, ValidationError):
        return Health(process, ready=False, stage="not answering")
    return Health(process, reply.ready, "ready" if reply.ready else reply.stage or "starting", reply.done, reply.total)
