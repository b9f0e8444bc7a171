"""Can a person see one request's way through the services?"""

import json
import re
import signal
import time
from typing import Any

import httpx
import pytest

from e2e.suite import Suite, wait_for

# In the session's loop, like everybody who uses the shared suite.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

TEXT_SERVICES = {"recipe", "entrypoint", "kvstore", "prefill_lb", "prefill", "decode_lb", "decode"}
PATH = {("recipe", "entrypoint"), ("prefill", "decode")}
SECRET = "marzipan"


async def ask(suite: Suite) -> str:
    """Ask with a prompt that is long enough to be looked up; return the answer's x-request-id."""
    async with httpx.AsyncClient(base_url=suite.base_url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        message = {"role": "user", "content": f"My secret word is {SECRET}. " * 40}
        body = {"model": model, "messages": [message], "max_tokens": 3, "temperature": 0}
        reply = await client.post("/v1/chat/completions", json=body)
    assert 200 == reply.status_code, reply.text
    return str(reply.headers["x-request-id"])


async def told(suite: Suite, request_id: str) -> dict[str, Any]:
    """Return the journey as JSON when every service's spans and PATH are there: each sends them by its own clock."""
    deadline = time.monotonic() + 30
    while True:
        done = await suite.console("trace", request_id, "--json")
        journey: dict[str, Any] = json.loads(done.stdout) if 0 == done.returncode else {"rows": []}
        is_whole = {row["service"] for row in journey["rows"]} >= TEXT_SERVICES
        if is_whole and {tuple(pair) for pair in journey["path"]} >= PATH:
            return journey
        assert time.monotonic() < deadline, done.stderr or done.stdout


async def test_a_request_s_way_names_every_service_it_took(shared_suite: Suite) -> None:
    """By the id that its answer carried; every span hangs below the recipe's, and what was said is in none of them."""
    request_id = await ask(shared_suite)
    journey = await told(shared_suite, request_id)

    assert (request_id, 200, 3) == (journey["id"], journey["status"], journey["output_tokens"])
    assert {row["service"] for row in journey["rows"]} == TEXT_SERVICES
    assert [journey["rows"][0]] == [row for row in journey["rows"] if row["depth"] == 0]
    assert 0 < journey["ttft_seconds"] < journey["total_seconds"]
    assert all(0 <= row["start_seconds"] for row in journey["rows"])
    assert SECRET not in json.dumps(journey)


async def test_the_last_request_is_drawn_and_listed(shared_suite: Suite) -> None:
    """In the terminal: a line a span with a bar, and a line a request."""
    request_id = await ask(shared_suite)
    await told(shared_suite, request_id)  # it is there
    drawn = (await shared_suite.console("trace", "last")).stdout
    listed = (await shared_suite.console("trace")).stdout

    assert drawn.startswith(f"request {request_id}")
    assert TEXT_SERVICES <= {
        line.split()[0] for line in drawn.splitlines() if "█" in line or "▏" in line or "·" in line
    }
    assert re.search(rf"^{request_id} .* 200 length$", listed, re.MULTILINE)


async def test_the_page_shows_services_load_and_the_way(shared_suite: Suite) -> None:
    """Where the state says it is; for browsers that came by our own name."""
    request_id = await ask(shared_suite)
    await told(shared_suite, request_id)  # it is there
    url = shared_suite.recorded().console_url
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        deadline = time.monotonic() + 30
        # The page waits a second for what a service says of its load.
        while not re.search(r"decode: KV blocks in use</dt><dd>\d+ of \d+ ", (front := await client.get("/")).text):
            assert time.monotonic() < deadline, front.text
        page = await client.get("/request", params={"id": request_id})
        stranger = await client.get("/", headers={"host": "rebound.example"})

    assert 8 == front.text.count("/metrics")
    assert request_id in front.text
    assert "recipe to entrypoint; 2. " in page.text
    assert 421 == stranger.status_code


async def test_a_console_that_dies_ends_no_request(shared_suite: Suite) -> None:
    """Requests are answered while it is away; it is started again at its old addresses, and sees the next ones."""
    before = shared_suite.recorded().console
    assert before is not None
    assert before.identity is not None
    before.identity.send(signal.SIGKILL)

    await ask(shared_suite)

    def successor() -> bool:
        now = shared_suite.recorded().console
        return now is not None and now.identity not in {None, before.identity}

    await wait_for(successor, 30, "the console to be started again")
    await wait_for(lambda: answers(f"{shared_suite.recorded().console_url}/healthz"), 30, "the console to answer")
    journey = await told(shared_suite, await ask(shared_suite))
    assert before.health_url == getattr(shared_suite.recorded().console, "health_url", "")
    assert "recipe" == journey["rows"][0]["service"]


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False
