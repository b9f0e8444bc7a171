"""What do eight services cost around the engine: throughput, added latency, idle memory?

The engine alone runs in this process, in turns with the suite, so that a drifting machine moves both.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from bench.machine import describe
from e2e.suite import Suite
from kernels.batch import Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.generate import GenerateRequest, Generator
from services.local.plan import thread_plan
from services.local.pull import pull

CONCURRENCY = 8
REQUESTS = 24
"""In a closed loop: whoever has an answer asks again."""
PROMPT_TOKENS = 256
ANSWER_TOKENS = 64
ROUNDS = 2
WARM_PROMPT_TOKENS = 129
"""One whole block that hits and one token to compute."""
WARM_REQUESTS = 60
TORCH_FREE = ("recipe", "entrypoint", "prefill_lb", "decode_lb", "kvstore")

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT = httpx.Timeout(120.0, connect=5.0)
_GREEDY = SamplingParams(temperature=0.0)


def fresh_prompt(num_tokens: int) -> list[int]:
    """Random ids, so that nothing is cached."""
    return [100 + secrets.randbelow(40_000) for _ in range(num_tokens)]


def say(figure: str, value: float, unit: str, **more: object) -> None:
    """Print one figure as one JSON line."""
    print(
        json.dumps({"bench": "service", "figure": figure, "value": round(value, 3), "unit": unit, **more}), flush=True
    )


async def ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int) -> int:
    """Stream one answer; return how many tokens its usage counts."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    num_tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and '"usage":{' in line.replace(" ", ""):
                num_tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return num_tokens


async def suite_speed(client: httpx.AsyncClient, model: str) -> float:
    """Aggregate answer tokens per second of eight clients over HTTP, prefill included."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one() -> int:
        async with gate:
            return await ask(client, model, fresh_prompt(PROMPT_TOKENS), ANSWER_TOKENS)

    begun = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(REQUESTS)))
    return sum(counts) / (time.perf_counter() - begun)


def engine_speed(generator: Generator) -> float:
    """Give the same for the engine alone."""
    requests = [
        GenerateRequest(token_ids=fresh_prompt(PROMPT_TOKENS), sampling=_GREEDY, max_tokens=ANSWER_TOKENS)
        for _ in range(REQUESTS)
    ]
    begun = time.perf_counter()
    results = generator.generate(requests)
    return sum(len(r.token_ids) for r in results) / (time.perf_counter() - begun)


def warm_step(executor: Executor, prompt: Sequence[int]) -> None:
    """Compute what prefill computes for a warm prompt: its last token, against one block of KV."""
    row = Row(sequence=0, token_ids=prompt[-1:], position=len(prompt) - 1, block_table=(1, 2), sampling=_GREEDY)
    executor.collect(executor.launch(Batch(rows=(row,))))


async def added_latency(client: httpx.AsyncClient, model: str, executor: Executor) -> None:
    """Warm one-token answers: the whole way by HTTP, minus what the engine needs for that token."""
    prompt = fresh_prompt(WARM_PROMPT_TOKENS)
    for _ in range(5):
        await ask(client, model, prompt, 1)
        warm_step(executor, prompt)
    whole, alone = [], []
    for _ in range(WARM_REQUESTS):
        begun = time.perf_counter()
        await ask(client, model, prompt, 1)
        whole.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        warm_step(executor, prompt)
        alone.append(time.perf_counter() - begun)
    added = (statistics.median(whole) - statistics.median(alone)) * 1e3
    say(
        "added_latency_p50",
        added,
        "ms",
        target="<= 15",
        http_ms=round(statistics.median(whole) * 1e3, 2),
        engine_ms=round(statistics.median(alone) * 1e3, 2),
        requests=WARM_REQUESTS,
    )


async def measure(folder: Path, model_dir: Path) -> None:
    """Run all parts against one suite in bf16."""
    async with Suite.running(folder, model=model_dir, dtype="bf16", has_console=True) as suite:
        await asyncio.sleep(2)
        for process in suite.recorded().processes:
            if process.service in TORCH_FREE:
                rss = psutil.Process(await suite.pid(process.name)).memory_info().rss / 2**20
                say(f"idle_rss_{process.service}", rss, "MiB", target="<= 120")
        cores = psutil.cpu_count() or 1
        like_prefill = Executor.load(model_dir, dtype="bf16", num_blocks=8, threads=thread_plan(cores, 1, 1))
        async with httpx.AsyncClient(base_url=suite.base_url, timeout=_TIMEOUT) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            await ask(client, model, fresh_prompt(PROMPT_TOKENS), 8)
            await added_latency(client, model, like_prefill)
            # Alone, the engine has every core to itself.
            engine = Executor.load(model_dir, dtype="bf16", num_blocks=64, threads=cores)
            generator = Generator(engine, max_batch=CONCURRENCY)
            generator.generate([GenerateRequest(token_ids=fresh_prompt(PROMPT_TOKENS), max_tokens=8)])
            speeds = []
            for _ in range(ROUNDS):
                alone = engine_speed(generator)
                speeds.append((await suite_speed(client, model), alone))
    through, alone = (statistics.median(column) for column in zip(*speeds, strict=True))
    ratio = statistics.median(a / b for a, b in speeds)
    say(
        "tokens_per_second_at_8",
        through,
        "tok/s",
        engine_alone=round(alone, 1),
        ratio=round(ratio, 3),
        target=">= 0.70",
    )


def main() -> None:
    print(json.dumps({"bench": "service", "machine": describe()}), flush=True)
    model_dir = pull(_ROOT / ".fathom" / "models")
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as folder:
        asyncio.run(measure(Path(folder), model_dir))


if __name__ == "__main__":
    main()
