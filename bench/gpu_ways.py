"""Which of two ways is faster on this GPU, where both give the right answer?

    python -m bench.gpu_ways            # also: --only choice, --only parts, --only forms

choice: the best entries of rows of scores, by words or by counting (kernels/ops/gpu_choice.py).  parts: attention's
parts of 128 or 256 keys, as a function of batch and context (kernels/ops/gpu_attention.py).  forms: windows and sinks
against fp64, and what they cost beside plain attention.  About a minute. One JSON line each; every answer is checked
first, and one of the three that fails does not hide the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from functools import partial
from typing import Any

import torch

from bench.gpu_check import LLAMA, bf16, error, paged
from bench.gpu_time import graph_seconds, machine
from kernels.ops import gpu_choice
from kernels.ops.gpu_attention import FULL_PROGRAMS, LONG_PART_TOKENS, PART_TOKENS, attend, part_tokens, twin_attend
from kernels.ops.gpu_choice import select_by_words
from kernels.ops.gpu_index import select, select_by_counting

_CHOICES = ((256, 65_536, 512), (256, 131_072, 512), (256, 16_384, 512), (4096, 8192, 512))
_CUTS = ((2048, 8), (1024, 8), (1024, 4))
"""Groups a turn and warps, of the choice by words."""
_STEPS = ((1, 1024), (1, 8192), (4, 2048), (8, 1024), (8, 8192), (64, 1024), (256, 1024))


def say(**named: Any) -> bool:
    print(json.dumps({"bench": "gpu_ways"} | named), flush=True)
    return bool(named.get("same", True))


def time_choices() -> bool:
    """Normal scores, and few values with many ties; every row sees a little less than the one before."""
    good = True
    for rows, width, count in _CHOICES:
        for kind in ("normal", "ties"):
            scores = torch.randn(rows, width, device="cuda")
            scores = (scores if kind == "normal" else (2 * scores).round()).bfloat16()
            seen = torch.arange(width, width - rows, -1, device="cuda").int()
            checked = slice(0, min(rows, 8))
            expected = select(scores[checked].cpu(), seen[checked].cpu(), count=count)
            counting = partial(select_by_counting, scores, seen, count=count)
            took = {"counting": graph_seconds([counting] * 4)}
            same = torch.equal(expected, counting()[checked].cpu())
            before = gpu_choice.STEP, gpu_choice.WARPS
            for cut in _CUTS:
                gpu_choice.STEP, gpu_choice.WARPS = cut
                by_words = partial(select_by_words, scores, seen, count=count)
                same &= torch.equal(counting(), by_words())
                took[f"words, {cut[0]} groups, {cut[1]} warps"] = graph_seconds([by_words] * 4)
            gpu_choice.STEP, gpu_choice.WARPS = before
            micros = {name: round(seconds * 1e6, 1) for name, seconds in took.items()}
            good &= say(way="choice", rows=rows, width=width, count=count, scores=kind, same=same, us=micros)
    return good


def time_parts() -> bool:
    """A layer of Llama-8B's decode attention; the choice is what `part_tokens` says."""
    good = True
    for batch, context in _STEPS:
        place = paged(LLAMA, batch, -(-context // 128))
        queries = bf16(batch, LLAMA.num_heads * LLAMA.head_dim)
        tiles = torch.tensor([(at + 1, at, 1, context - 1) for at in range(batch)], dtype=torch.int32, device="cuda")
        splits = min(32, -(-FULL_PROGRAMS // (batch * LLAMA.num_kv_heads)))
        calls = {part: partial(attend, queries, tiles, LLAMA, place, splits=splits, part=part) for part in _PARTS}
        took = {part: round(graph_seconds([call] * 8) * 1e6, 2) for part, call in calls.items()}
        apart = error(calls[PART_TOKENS](), calls[LONG_PART_TOKENS]())
        chosen = part_tokens(batch, LLAMA.num_kv_heads, context)
        good &= say(way="parts", batch=batch, context=context, us=took, chosen=chosen, error=apart, same=apart < 1e-2)
    return good


_PARTS = (PART_TOKENS, LONG_PART_TOKENS)


def time_forms() -> bool:
    """16 sequences of 4,096 tokens: all keys, the newest 128, and these with sinks."""
    batch, context = 16, 4096
    place = paged(LLAMA, batch, -(-context // 128))
    queries, sinks = bf16(batch, LLAMA.num_heads * LLAMA.head_dim), torch.randn(LLAMA.num_heads, device="cuda")
    tiles = torch.tensor([(at + 1, at, 1, context - 1 - at) for at in range(batch)], dtype=torch.int32, device="cuda")
    good = True
    for name, named in (
        ("plain", {}), ("sinks", {"sinks": sinks}), ("window", {"window": 128}),
        ("window and sinks", {"window": 128, "sinks": sinks}),
    ):  # fmt: skip
        call = partial(attend, queries, tiles, LLAMA, place, **named)
        expected = twin_attend(queries, tiles, LLAMA, place, **named)
        apart, same = error(expected, call()), all(torch.equal(call(), call(splits=count)) for count in (2, 7))
        micros = {f"x{splits}": round(graph_seconds([partial(call, splits=splits)] * 8) * 1e6, 2) for splits in (1, 3)}
        good &= say(way="forms", form=name, us=micros, error=apart, same=same and apart < 1e-2)
    return good


WAYS = {"choice": time_choices, "parts": time_parts, "forms": time_forms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(WAYS), action="append")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        say(skipped="there is no GPU here")
        return 2
    say(machine=machine())
    with torch.inference_mode():
        passed = [survived(name) for name in asked.only or WAYS]  # each, whatever those before say
    return int(not all(passed))


def survived(name: str) -> bool:
    """Whether it came to its end, and everything in it was right."""
    try:
        return WAYS[name]()
    except Exception as error:  # noqa: BLE001 - said, and the next is tried
        traceback.print_exc(limit=6, file=sys.stderr)
        return say(way=name, same=False, failed=f"{type(error).__name__}: {str(error)[-300:]}")


if __name__ == "__main__":
    sys.exit(main())
