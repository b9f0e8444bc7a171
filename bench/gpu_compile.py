"""How is what V4.1's steps launch compiled before the first step, on all cores instead of one after the other?

    python -m bench.gpu_compile                    # decode and prefill, both modes: two minutes of one core, shared
    python -m bench.gpu_compile --workers 2 --steps decode

Each worker walks through the steps of bench/gpu_v41_step.py over tensors without values, and compiles its share of what
they launch into Triton's cache, where the steps find it: machine code, and the C that launches it. No GPU is touched,
nor needed. The drafter's own layers are not among them. One JSON line a worker, and one for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("decode", "prefill")
HOPPER = "9.0"


def work(share: str, capability: tuple[int, int], steps: list[str]) -> dict[str, Any]:
    """A worker's share, "place/workers"."""
    import torch
    from triton import knobs

    if knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set: what is interpreted is not compiled")
    # Asked as kernels are decorated, and by those that choose among them; a context on the device takes memory.
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: capability
    from bench.gpu_compile_walk import compile_launcher, compile_source, sources

    place, workers = map(int, share.split("/"))
    start, made, failed, seen = time.perf_counter(), 0, [], 0
    for seen, source in enumerate(sources(steps), 1):
        if seen % workers != place:
            continue
        try:
            compile_launcher(source, compile_source(source, capability))
            made += 1
        except Exception as error:  # noqa: BLE001 - the step that launches it will say so again
            failed.append(f"{source.name}: {type(error).__name__}: {str(error)[-200:]}")
    seconds = round(time.perf_counter() - start, 2)
    return {"figure": "worker", "share": share, "sources": seen, "compiled": made, "not": failed, "seconds": seconds}


def compile_all(workers: int, capability: str, steps: list[str], seconds: float) -> dict[str, Any]:
    """What all workers did; those that have not ended in time are ended."""
    start = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.gpu_compile", "--share", f"{place}/{workers}",
             "--capability", capability, "--steps", *steps],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )
        for place in range(workers)
    ]  # fmt: skip
    found: list[dict[str, Any]] = []
    try:
        for each in running:
            said, _ = each.communicate(timeout=max(seconds - (time.monotonic() - start), 0.1))
            lines = [line for line in said.splitlines() if line.startswith("{")]
            found += [json.loads(line) for line in lines]
            print("\n".join(lines), flush=True)
    except subprocess.TimeoutExpired:
        pass  # what is missing is compiled when it is launched
    finally:
        for each in running:
            each.kill()
            each.wait()
    failed = [name for each in found for name in each["not"]]
    return {
        "figure": "compiled ahead",
        "sources": max((each["sources"] for each in found), default=0),
        "compiled": sum(each["compiled"] for each in found),
        "not": failed[:5],
        "workers": workers,
        "core_seconds": round(sum(each["seconds"] for each in found), 1),
        "seconds": round(time.monotonic() - start, 1),
        "passed": len(found) == workers and not failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--seconds", type=float, default=110.0, help="workers are ended after so long")
    parser.add_argument("--capability", default=HOPPER, help="of the GPU that it is compiled for")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.share:
        major, minor = map(int, asked.capability.split("."))
        print(json.dumps(work(asked.share, (major, minor), asked.steps)), flush=True)
        return 0
    made = compile_all(asked.workers, asked.capability, asked.steps, asked.seconds)
    print(json.dumps(made), flush=True)
    return int(not made["passed"])


if __name__ == "__main__":
    sys.exit(main())
