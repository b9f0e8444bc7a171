"""Which figures does the project quote, and how are they measured? One JSON line each."""

from __future__ import annotations

import argparse
import subprocess
import sys

PARTS = {
    "engine": "the engine alone: prefill and decode speed beside a plain torch loop in the same run",
    "service": "all eight services over HTTP: throughput beside the engine alone, added latency, idle memory",
    "recipe": "the recipe alone: streamed tokens per core, a chat's CPU, long prompts beside a stream, idle memory",
    "v41": "DeepSeek-V4.1 on this CPU: tokens/s, bytes moved by a decode step beside the formats', replay beside none",
    "kvstore": "the KV store: segments beside fio, lookups beside an empty RPC",
    "kv_traces": "the KV store on published traces: hit rate by capacity and by life beside an endless cache",
    "handoff": "KV from prefill to decode: shared memory beside memcpy, gRPC beside a blocking socket",
    "warm": "first token of a long prompt that the KV store has beside one that it has not, through all services",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", help="; ".join(f"{name}: {text}" for name, text in PARTS.items()))
    wanted = parser.parse_args().parts or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    # Each part is a process of its own: no part runs with another's threads or memory.
    codes = [subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode for name in wanted]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
