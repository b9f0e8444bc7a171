"""What does the recipe cost: per streamed token, per request, per long prompt, and idle? `python -m bench.recipe`.

The recipe runs alone, as the process it is in production, before an entrypoint in another process that says prompts
back (bench/recipe_entrypoint.py). Costs are the recipe's own CPU time, so that work beside it only blurs them: how much
tells `yardstick_ms`, the CPU time of a fixed piece of Python in the same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path

import httpx
import psutil

from bench.machine import describe
from bench.recipe_entrypoint import STEP_TOKENS
from services.chassis.config import child_environment
from services.chassis.testing import NatsServer, free_port
from services.local.pull import pull
from services.recipe.body import parse_object
from services.recipe.model_folder import load_model
from services.recipe.schema import read_chat
from services.recipe.tokenizer import PromptTokenizer

STREAMS = 64
ANSWER_TOKENS = 768
STEP_SECONDS = 0.025
"""A decode step: 64 streams then bring 10,240 tokens a second, half of what one core is to bear."""
CHAT_REQUESTS = 200
CHAT_BATCH = 20
PROMPT_ROUNDS = 20
CHAT_TOKENS = 200
LONG_TOKENS = 50_000
LONG_REQUESTS = 8
PAUSE_SECONDS = 0.3
CONTEXT_TOKENS = 1 << 17
NAME = "bench"

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT = httpx.Timeout(120.0, connect=5.0)


def say(figure: str, value: float, unit: str, target: str, **more: object) -> None:
    """Print one figure as one JSON line."""
    told = {"bench": "recipe", "figure": figure, "value": round(value, 3), "unit": unit, "target": target}
    print(json.dumps(told | more | {"yardstick_ms": yardstick_ms(), "machine": describe()}), flush=True)


def yardstick_ms() -> float:
    """Return the CPU time of a fixed piece of Python, which other work on the machine makes slower, too."""
    best = []
    for _ in range(5):
        begun = time.process_time()
        json.loads(json.dumps([{"id": i, "text": "x" * (i % 50)} for i in range(4000)]))
        best.append(time.process_time() - begun)
    return round(sorted(best)[2] * 1e3, 2)


def body_of(api: str, text: str, max_tokens: int) -> tuple[str, dict[str, object]]:
    """Return the path and body of a streamed request to one of the three APIs."""
    said = [{"role": "user", "content": text}]
    common: dict[str, object] = {"model": NAME, "stream": True}
    if api == "responses":
        return "/v1/responses", common | {"input": text, "max_output_tokens": max_tokens, "store": False}
    return (
        "/v1/messages" if api == "messages" else "/v1/chat/completions",
        common | {"messages": said, "max_tokens": max_tokens},
    )


class Recipe:
    """The recipe under test, and a client of it."""

    def __init__(self, url: str, process: psutil.Process, tokenizer: PromptTokenizer, prose: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=httpx.Limits(max_connections=None))
        self.process = process
        self.tokenizer = tokenizer
        self._prose = prose

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all the process's threads so far, from where the kernel has it in nanoseconds."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    @property
    def rss_mib(self) -> float:
        """Resident memory."""
        return float(self.process.memory_info().rss) / 2**20

    def text(self, num_tokens: int, seed: int) -> str:
        """Return about num_tokens tokens of prose, another stretch for each seed."""
        size = int(len(self._prose) * num_tokens / self.prose_tokens)
        at = seed * 9973 % max(1, len(self._prose) - size)
        return self._prose[at : at + size]

    @property
    def prose_tokens(self) -> int:
        """Length of the prose in tokens, estimated from its beginning."""
        sample = self._prose[:100_000]
        return len(self.tokenizer.plain_ids(sample)) * len(self._prose) // len(sample)

    async def stream(self, api: str, text: str, max_tokens: int) -> list[float]:
        """Stream an answer to its end; return when its parts came."""
        path, body = body_of(api, text, max_tokens)
        async with self.http.stream("POST", path, json=body) as reply:
            if reply.status_code != HTTPStatus.OK:
                raise RuntimeError((await reply.aread()).decode())
            return [time.perf_counter() async for _part in reply.aiter_raw()]

    async def chat(self, text: str) -> float:
        """Ask for one token; return how long that took."""
        body = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        begun = time.perf_counter()
        reply = await self.http.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        return time.perf_counter() - begun


async def streaming(recipe: Recipe, api: str) -> None:
    """64 streams at once, 4 tokens a step: CPU time of the recipe for all of it, requests included."""
    texts = [recipe.text(CHAT_TOKENS, seed) for seed in range(STREAMS)]
    await asyncio.gather(*(recipe.stream(api, text, 2 * STEP_TOKENS) for text in texts))
    before, begun = recipe.cpu_seconds, time.perf_counter()
    await asyncio.gather(*(recipe.stream(api, text, ANSWER_TOKENS) for text in texts))
    cpu, wall = recipe.cpu_seconds - before, time.perf_counter() - begun
    say(
        f"streamed_tokens_per_core_second_{api}",
        STREAMS * ANSWER_TOKENS / cpu,
        "tok/s",
        ">= 20000",
        streams=STREAMS,
        tokens_per_frame=STEP_TOKENS,
        cores_used=round(cpu / wall, 2),
    )


def prompts(folder: Path, recipe: Recipe) -> None:
    """The overhead of a chat by itself, in this process: its body parsed and checked, rendered and encoded."""
    model = load_model(folder)
    bodies = [
        json.dumps({"model": NAME, "messages": [{"role": "user", "content": recipe.text(CHAT_TOKENS, seed)}]}).encode()
        for seed in range(CHAT_BATCH)
    ]
    costs = []
    for _ in range(PROMPT_ROUNDS):
        begun = time.thread_time()
        for body in bodies:
            asked = read_chat(parse_object(body), model.rules)
            model.encoder.chat_prompt(asked.conversation, context_tokens=model.context_tokens)
        costs.append((time.thread_time() - begun) / CHAT_BATCH * 1e3)
    say("chat_prompt_cpu", statistics.median(costs), "ms", "<= 2", prompt_tokens=CHAT_TOKENS, best=round(min(costs), 3))


async def requests(recipe: Recipe) -> None:
    """Chats of 200 tokens, one after another, answered at once: CPU time of the recipe for each."""
    texts = [recipe.text(CHAT_TOKENS, seed) for seed in range(CHAT_REQUESTS)]
    await asyncio.gather(*map(recipe.chat, texts[:CHAT_BATCH]))
    costs = []
    for batch in [texts[at : at + CHAT_BATCH] for at in range(0, CHAT_REQUESTS, CHAT_BATCH)]:
        before = recipe.cpu_seconds
        for text in batch:
            await recipe.chat(text)
        costs.append((recipe.cpu_seconds - before) / len(batch) * 1e3)
    say(
        "chat_request_cpu",
        statistics.median(costs),
        "ms",
        "none: all of it, HTTP, gRPC, logs and records included",
        prompt_tokens=CHAT_TOKENS,
        requests=CHAT_REQUESTS,
        best_batch=round(min(costs), 3),
    )


def gaps(arrivals: list[float]) -> list[float]:
    """Return the times between the parts of a stream."""
    return sorted(after - before for before, after in itertools.pairwise(arrivals))


def p99(values: list[float]) -> float:
    """Return the value that one in a hundred exceeds; of sorted ones."""
    return values[min(len(values) - 1, len(values) * 99 // 100)]


async def long_prompts(recipe: Recipe) -> None:
    """Chats of 50,000 tokens while a stream runs: how long each takes, and what the stream notices."""
    texts = [recipe.text(LONG_TOKENS, seed) for seed in range(LONG_REQUESTS)]
    num_tokens = len(recipe.tokenizer.plain_ids(texts[0]))
    steps = 120
    running = recipe.text(CHAT_TOKENS, 1)
    quiet = gaps(await recipe.stream("chat", running, steps * STEP_TOKENS))
    stream = asyncio.create_task(recipe.stream("chat", running, 4 * steps * STEP_TOKENS))
    await asyncio.sleep(PAUSE_SECONDS)
    seconds, spans, cpu = [], [], recipe.cpu_seconds
    for text in texts:
        begun = time.perf_counter()
        seconds.append(await recipe.chat(text))
        spans.append((begun, time.perf_counter()))
    cpu = recipe.cpu_seconds - cpu
    if stream.done():
        raise RuntimeError("the stream ended before the prompts were encoded")
    arrivals = await stream
    # Only gaps that a prompt falls into: what lies between is no news.
    inside = sorted(
        after - before
        for before, after in itertools.pairwise(arrivals)
        if any(before < end and after > begun for begun, end in spans)
    )
    say(
        "long_prompt",
        sorted(seconds)[len(seconds) // 2],
        "s",
        "<= 0.4",
        prompt_tokens=num_tokens,
        cpu_seconds=round(cpu / LONG_REQUESTS, 3),
        worst=round(max(seconds), 3),
    )
    say(
        "stream_gap_p99_while_encoding",
        p99(inside) * 1e3,
        "ms",
        "<= 50",
        gaps=len(inside),
        worst_ms=round(inside[-1] * 1e3, 1),
        p99_alone_ms=round(p99(quiet) * 1e3, 1),
        step_ms=STEP_SECONDS * 1e3,
    )


async def measure(folder: Path, recipe: Recipe) -> None:
    """Run all parts against one recipe."""
    await asyncio.sleep(1)
    say("idle_rss", recipe.rss_mib, "MiB", "<= 160")
    prompts(folder, recipe)
    await requests(recipe)
    for api in ("chat", "responses", "messages"):
        await streaming(recipe, api)
    await long_prompts(recipe)
    say("rss_after_load", recipe.rss_mib, "MiB", "none")


@contextlib.contextmanager
def started(command: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    """Run a process of the benchmark; it ends with the block."""
    process = subprocess.Popen([sys.executable, "-m", *command], text=True, **options)  # type: ignore[call-overload] # of Popen's own options
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextlib.asynccontextmanager
async def serving(folder: Path, step_seconds: float = STEP_SECONDS) -> AsyncIterator[Recipe]:
    """Run entrypoint and recipe for the model in `folder`."""
    listen = f"127.0.0.1:{free_port()}"
    command = ["bench.recipe_entrypoint", NAME, str(CONTEXT_TOKENS), str(step_seconds)]
    async with NatsServer() as nats:
        with started(command, stdout=subprocess.PIPE) as entrypoint:
            assert entrypoint.stdout is not None
            address = (await asyncio.to_thread(entrypoint.stdout.readline)).strip()
            settings = {
                "model": folder,
                "entrypoint_address": address,
                "public_listen": listen,
                "nats_url": nats.url,
            }
            environment = child_environment("recipe", settings)
            with started(["services.recipe"], env=environment, stdout=subprocess.DEVNULL) as process:
                recipe = Recipe(f"http://{listen}", psutil.Process(process.pid), PromptTokenizer.load(folder), _prose())
                async with recipe.http:
                    await _until_ready(recipe.http)
                    yield recipe


async def _until_ready(http: httpx.AsyncClient) -> None:
    for _ in range(300):
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/health")).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise TimeoutError("the recipe did not become ready")


def _prose() -> str:
    """Return about 400,000 characters of real text: our own documents and sources."""
    files = [*sorted((_ROOT / "docs").rglob("*.md")), *sorted((_ROOT / "services").glob("*/*.py"))]
    return "".join(file.read_text(encoding="utf-8") for file in files)[:400_000]


def _long_context(model: Path, folder: Path) -> Path:
    """Return a folder with the model's text side and a context that takes long prompts."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model / name, folder / name)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = CONTEXT_TOKENS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "fathom.json").write_text(json.dumps({"name": NAME}), encoding="utf-8")
    return folder


async def _run(model: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as folder:
        text_side = _long_context(model, Path(folder))
        async with serving(text_side) as recipe:
            await measure(text_side, recipe)


def main() -> None:
    asyncio.run(_run(pull(_ROOT / ".fathom" / "models")))


if __name__ == "__main__":
    main()
