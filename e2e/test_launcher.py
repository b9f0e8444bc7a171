"""Does `fathom` do what its help says, with real processes?"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from e2e.suite import START_SECONDS, Suite, wait_for
from services.chassis.config import SERVICES
from services.local.ports import reserve
from services.prefill.tests.tiny_model import write_tiny_model
from services.prefill.tests.tiny_tokenizer import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

LONG = "Repeat after me, word by word. " * 60
CONTEXT_TOKENS = 8192
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


async def ask(suite: Suite, text: str = "Name a colour.", max_tokens: int = 4) -> dict[str, Any]:
    """Return a chat completion's JSON."""
    async with httpx.AsyncClient(base_url=suite.base_url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        reply = await client.post("/v1/chat/completions", json=body)
    assert 200 == reply.status_code, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def until_served(suite: Suite, seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while True:
        try:
            await ask(suite)
        except (AssertionError, httpx.HTTPError, IndexError):
            assert time.monotonic() < give_up, "the suite did not come back"
            await asyncio.sleep(0.3)
        else:
            return


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: the launcher's promises are the same for every model, and this one starts soonest."""
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "small")
    write_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    return model


@pytest.fixture(scope="module")
def launched(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """One suite, started and ended by the tests in the order they stand here."""
    suite = Suite(tmp_path_factory.mktemp("launched"), model=small_model, has_console=True)
    yield suite
    asyncio.run(suite.stop())


async def test_detach_keeps_no_pipe_of_its_caller_open(launched: Suite) -> None:
    """`x=$(fathom up --detach)` returns, with the ready line and a curl to paste."""
    # The command gets the pipe as stdin, stdout, stderr and under its own number: reading ends once nobody holds it.
    read_end, write_end = os.pipe()
    up = launched.begin(*launched.up_words, "--detach", stdin=write_end, output=write_end, keep=(write_end,))
    os.close(write_end)
    with os.fdopen(read_end) as output:
        text = await asyncio.wait_for(asyncio.to_thread(output.read), START_SECONDS)

    assert 0 == up.wait(30), f"{text}\n{launched.log_tails()}"
    assert f"ready: small at {launched.base_url}" in text
    assert reserve(launched.port) is None, "the supervisor keeps what `up` reserved"
    assert "curl -N" in text


async def test_the_launcher_s_own_request_says_so(launched: Suite) -> None:
    """Whoever looks at the traces did not ask it; its id says what did, in the terminal and on the page."""

    async def until_newest(*are_launcher_s: bool) -> None:
        """Wait until these are the newest requests: the services send their spans when they get to it."""
        give_up = time.monotonic() + 30
        listed: list[dict[str, Any]] = []
        while [*are_launcher_s] != [one["id"].startswith("ready-check-") for one in listed]:
            assert time.monotonic() < give_up, listed
            listed = json.loads((await launched.console("trace", "--json")).stdout)

    await until_newest(True)
    async with httpx.AsyncClient(timeout=30) as client:
        page = (await client.get(launched.recorded().console_url)).text
    assert 1 == page.count(">ready-check-")
    await ask(launched)
    await until_newest(False, True)


async def test_down_leaves_nothing_but_the_stored_kv(launched: Suite) -> None:
    """No process, no shared memory; after the next `up` a prompt seen before still hits."""
    cold = await ask(launched, LONG)
    give_up = time.monotonic() + 30
    while not (await launched.kvstore_stats()).num_blocks:
        assert time.monotonic() < give_up, "nothing was stored"
        await asyncio.sleep(0.1)
    running = launched.recorded().left_running()
    assert len(("supervisor", "nats", "console", *SERVICES)) == len(running)
    shared = launched.shared_memory("decode-0")
    assert shared.exists()

    await launched.stop()

    assert [] == [identity for identity in running if identity.process() is not None]
    assert not shared.exists()
    await launched.start()
    warm = await ask(launched, LONG)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert cold["choices"] == warm["choices"]


async def test_status_shows_every_process_ready(launched: Suite) -> None:
    """Exit status 0 means that all are ready; every process is named."""
    done = await launched.until_all_ready()

    for word in (*SERVICES, "nats", "prefill-0", "decode-0"):
        assert word in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"HTTP API {launched.base_url}/v1  model small  from /")


async def test_chat_streams_an_answer_and_then_its_cost(launched: Suite) -> None:
    """Prompt tokens, cached tokens, time to first token, speed, that it was cut off; and how to see its way."""
    done = await launched.console("chat", "Count from one to ten.", "--max-tokens", "16", "--temperature", "0")

    assert 0 == done.returncode, done.stderr
    *answer, cost, hint = done.stdout.splitlines()
    assert "".join(answer).strip()
    figures, _, end = cost.partition("] ")
    assert re.fullmatch(r"\[\d+ prompt tokens, \d+ cached, TTFT \d+ ms, [\d.]+ tokens/s", figures)
    assert "(cut off: --max-tokens)" == end
    assert hint.endswith("fathom trace last")


async def test_logs_of_all_services_are_merged(launched: Suite) -> None:
    """Every process's lines are there, each with its name in front."""
    done = await launched.console("logs", "--no-follow")

    names = {line.split("|")[0].strip() for line in done.stdout.splitlines()}
    assert set(launched.state()) <= names


async def test_a_second_suite_on_the_busy_port_is_refused(launched: Suite, tmp_path: Path, small_model: Path) -> None:
    """The error names the port, and nothing of the first suite suffers."""
    other = Suite(tmp_path, model=small_model)
    done = await other.console("up", "--model", str(small_model), "--port", str(launched.port))

    assert 1 == done.returncode
    assert f"port {launched.port} is in use" in done.stderr
    await launched.until_all_ready()


async def test_a_second_up_in_the_same_directory_is_refused(launched: Suite, small_model: Path) -> None:
    """The error says how to stop the first."""
    done = await launched.console("up", "--model", str(small_model), "--port", "1")

    assert 1 == done.returncode
    assert "fathom down" in done.stderr


@pytest.mark.parametrize("name", ["vision-0", "decode-0", "nats-0"])
async def test_a_crashed_process_is_started_again_and_said_so(launched: Suite, name: str) -> None:
    """Same port, same settings; the log says it, and answers come again."""
    address = launched.address(name)

    await launched.restart(name, signal.SIGKILL)

    assert (address, 1) == (launched.address(name), launched.state()[name].restarts)
    events = [json.loads(line) for line in launched.log("supervisor").read_text().splitlines()]
    assert [-9] == [e["exit_code"] for e in events if e["event"] == "launcher.service.ended" and e["process"] == name]
    await until_served(launched)


async def test_ctrl_c_stops_everything(launched: Suite) -> None:
    """In the foreground, SIGINT ends all processes and then the command, with status 0; a restart before it was said."""
    running = launched.recorded().left_running()
    assert len(("supervisor", "nats", "console", *SERVICES)) == len(running)
    said = launched.folder / "console.txt"
    await wait_for(lambda: "vision-0 ended with status -9" in said.read_text(), 60, "the restart to be said")

    status, text = await launched.interrupt()

    assert 0 == status, text
    assert ["stopping: waiting up to 10 s for running answers", "stopped"] == text.splitlines()[-2:]
    assert [] == [identity for identity in running if identity.process() is not None]
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", launched.port))


async def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path, small_model: Path) -> None:
    """A file of weights that was cut off: non-zero, the service's own words, no process left."""
    folder = tmp_path / "half-weights"
    shutil.copytree(small_model, folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    suite = Suite(tmp_path, model=folder)
    done = await suite.console(*suite.up_words, "--detach", timeout=90)

    assert 1 == done.returncode
    assert re.search(r"(prefill|decode)-0 ended with status 78", done.stderr), done.stderr
    assert "not a complete safetensors file" in done.stderr
    assert [] == suite.recorded().left_running()
    assert [] == [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]


async def test_a_start_whose_folder_is_removed_ends_at_once(tmp_path: Path, small_model: Path) -> None:
    """It says so within seconds, where nothing can be asked any more, and no process is left."""
    suite = Suite(tmp_path, model=small_model)
    with (tmp_path / "said.txt").open("w") as output:
        up = suite.begin(*suite.up_words, "--detach", stdin=None, output=output.fileno())
    await wait_for(lambda: suite.home.state.exists() and len(suite.recorded().left_running()) > 5, 60, "its processes")
    running = suite.recorded().left_running()
    begun = time.monotonic()
    shutil.rmtree(suite.home.root, ignore_errors=True)  # a process may make a file while it goes through them

    assert 1 == await asyncio.to_thread(up.wait, 60)
    assert time.monotonic() - begun < 30  # a tenth of a second where nothing else runs; five minutes for a mere hang
    assert ".fathom was removed or moved away" in (tmp_path / "said.txt").read_text()
    assert [] == [identity for identity in running if identity.process() is not None]


async def test_a_bad_setting_is_refused_before_anything_starts(tmp_path: Path, small_model: Path) -> None:
    """In the words that were typed; not even the state file is written."""
    suite = Suite(tmp_path, model=small_model, env={"FATHOM_DECODE_MAX_BATCH": "many"})
    done = await suite.console(*suite.up_words, "--detach")

    assert 1 == done.returncode
    assert "--set decode.max_batch=many: " in done.stderr
    assert not suite.home.state.exists()
