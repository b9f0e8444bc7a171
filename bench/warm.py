"""How much sooner is the first token when the KV store has the prompt? `python -m bench.warm`, two to five minutes.

Through all eight services: a long prompt cold, then again after prefill was restarted, so that nothing but the KV store
can have it. Printed against the prefill speed of the same run, which decides how much there is to win.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from bench.machine import describe
from bench.service import fresh_prompt
from e2e.suite import Suite
from services.local.pull import pull

PROMPT_TOKENS = 2_001
"""The last one is always computed."""
ROUNDS = 5
BLOCK_TOKENS = 128

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT = httpx.Timeout(300.0, connect=5.0)


async def first_token(client: httpx.AsyncClient, model: str, prompt: list[int]) -> tuple[float, int]:
    """Return (seconds to a one-token answer, cached tokens)."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    begun = time.perf_counter()
    reply = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return time.perf_counter() - begun, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


async def measure(folder: Path, model_dir: Path) -> None:
    """Ask each prompt once cold and once warm."""
    async with (
        Suite.running(folder, model=model_dir, dtype="bf16") as suite,
        httpx.AsyncClient(base_url=suite.base_url, timeout=_TIMEOUT) as client,
    ):
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        prompts = [fresh_prompt(PROMPT_TOKENS) for _ in range(ROUNDS)]
        before = (await suite.kvstore_stats()).num_blocks
        cold = [await first_token(client, model, prompt) for prompt in prompts]
        wanted = before + ROUNDS * (PROMPT_TOKENS // BLOCK_TOKENS)
        await _until_stored(suite, wanted)
        await suite.restart("prefill-0")
        await suite.wait_ready("prefill-0")
        await first_token(client, model, fresh_prompt(16))
        warm = [await first_token(client, model, prompt) for prompt in prompts]
    if any(tokens for _, tokens in cold) or any(tokens != 1_920 for _, tokens in warm):
        raise SystemExit(f"not cold and warm: {cold} {warm}")
    cold_seconds, warm_seconds = (statistics.median(seconds for seconds, _ in runs) for runs in (cold, warm))
    line = {
        "name": "warm_prefix_first_token",
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": 1_920,
        "cold_seconds": round(cold_seconds, 3),
        "warm_seconds": round(warm_seconds, 3),
        "ratio": round(statistics.median(w / c for (w, _), (c, _) in zip(warm, cold, strict=True)), 3),
        "prefill_tokens_per_second": round(PROMPT_TOKENS / cold_seconds),
        "machine": describe(),
    }
    print(json.dumps(line), flush=True)


async def _until_stored(suite: Suite, num_blocks: int) -> None:
    async with asyncio.timeout(60):
        while (await suite.kvstore_stats()).num_blocks < num_blocks:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.1)


def main() -> None:
    model_dir = pull(_ROOT / ".fathom" / "models")
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as folder:
        asyncio.run(measure(Path(folder), model_dir))


if __name__ == "__main__":
    main()
