"""Where is the time of a dense model's steps, on a timeline?

    nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx python -m bench.gpu_profile --model llama-8b
    python -m bench.gpu_profile --trace steps.json          # torch's profiler instead, for a browser

A few decode steps of one batch, run ahead, and one chunk of prompts, with random weights. Ranges name steps, draws, and
groups of layers where the layers are not one graph. Needs a GPU, for half a minute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from bench.gpu_dense import Case, Loop
from bench.gpu_models import RandomModel
from bench.gpu_shapes import GPU_SHAPES
from kernels.ops.ranges import named, profiled

_PROMPTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(GPU_SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--invariant", action="store_true", help="as it is served")
    parser.add_argument("--trace", type=Path, help="write torch's own trace there")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "gpu_profile", "skipped": "there is no GPU here"}))
        return 2
    decode, prefill = Case("decode", asked.batch, asked.context), Case("prefill", _PROMPTS, asked.context)
    with tempfile.TemporaryDirectory(prefix="fathom-profile-") as scratch:
        model = RandomModel(asked.model, Path(scratch))
        blocks = 2 + max(asked.batch, _PROMPTS) * (2 + asked.context // 128)
        executor = model.executor(blocks, invariant=asked.invariant)
        steps, prompts = Loop(executor, decode), Loop(executor, prefill)
        steps.ahead()
        prompts.prefill()
        torch.cuda.synchronize()
        profiler = torch.profiler.profile() if asked.trace else nullcontext()
        torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call] # torch's stub
        with profiler as seen, profiled():
            with named(f"decode {asked.batch} x {asked.context}"):
                steps.ahead()
            with named(f"prefill {_PROMPTS} x {asked.context}"):
                prompts.prefill()
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call] # torch's stub
        if seen is not None:
            seen.export_chrome_trace(str(asked.trace))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
