"""Are the dense kernels right on this GPU at real dimensions, and which of their bits depend on a tile?

    python -m bench.gpu_check                # a minute; also: --only sampler

Errors are relative, against fp64; one JSON line per check, "ok" false where a promise is broken. The sampler's choices
are the host sampler's: top-k, top-p and min-p in one batch, at vocabularies and temperatures where ties and whole rows
are cut.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu_time import machine
from kernels.batch import SamplingParams
from kernels.ops.gpu_attention import CHUNK, Shape, attend, tokens_per_tile
from kernels.ops.gpu_linear import Tile, library_linear, linear, linear_swiglu
from kernels.ops.gpu_norm import add_rms_norm, twin_add_rms_norm
from kernels.ops.gpu_rope_cache import Heads, Paging, Turning, rope_and_store, twin_rope_and_store
from kernels.ops.gpu_sampler import NUM_ASKED, Features, draw
from kernels.ops.gpu_swiglu import swiglu, twin_swiglu
from kernels.ops.gumbel import noise_key
from kernels.ops.sampler import Draw, sample

LLAMA, SMOL = Heads(32, 8, 128), Heads(9, 3, 64)
_said: list[dict[str, Any]] = []
TILES = (
    Tile(64, 32, 128, 4, 5),
    Tile(64, 64, 64, 4, 4),
    Tile(16, 32, 128, 4, 4),
    Tile(16, 64, 256, 4, 3),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
)


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def error(expected: Tensor, got: Tensor) -> float:
    return float((expected.double() - got.double()).norm() / expected.double().norm())


def say(check: str, ok: bool, **facts: object) -> bool:  # noqa: FBT001 - a verdict
    _said.append({"check": check, "ok": ok, **facts})
    print(json.dumps(_said[-1]), flush=True)
    return ok


def check_rows() -> bool:
    """Norm and activation, odd row counts, poisoned outputs."""
    good = True
    for rows, hidden in ((1, 4096), (333, 4096), (77, 576)):
        residual, added, weight = bf16(rows, hidden, scale=3), bf16(rows, hidden), bf16(hidden)
        same = residual.clone()
        expected = twin_add_rms_norm(added, residual, weight, eps=1e-5)
        wrong = error(expected, add_rms_norm(added, same, weight, eps=1e-5))
        good &= say("norm", wrong < 4e-3 and torch.equal(residual, same), rows=rows, hidden=hidden, error=wrong)
    gate_up = bf16(333, 28672, scale=3)
    wrong = error(twin_swiglu(gate_up), swiglu(gate_up))
    return good & say("swiglu", wrong < 4e-3, error=wrong)


def paged(heads: Heads, rows: int, most: int) -> Paging:
    num_blocks = rows * most + 1
    layer = bf16(num_blocks, 2, 128, heads.num_kv_heads * heads.head_dim)
    tables = torch.zeros(rows + 1, most, dtype=torch.int32, device="cuda")
    tables[1:] = (1 + torch.randperm(num_blocks - 1, device="cuda")).view(rows, most).int()
    return Paging(layer, tables)


def check_rope() -> bool:
    good = True
    for heads in (LLAMA, SMOL):
        place = paged(heads, 4, 8)
        half = heads.head_dim // 2
        angles = torch.arange(1024, device="cuda")[:, None] * 10000.0 ** (-torch.arange(half, device="cuda") / half)
        turning = Turning(angles.cos(), angles.sin(), bf16(heads.row_size), bf16(2, heads.head_dim), 1e-6)
        qkv = bf16(200, heads.row_size)
        rows = torch.randint(0, 5, (200,), device="cuda", dtype=torch.int32)
        positions = torch.randperm(1024, device="cuda")[:200].int()
        cache = Paging(place.layer.clone(), place.tables)
        expected = twin_rope_and_store(qkv, rows, positions, heads, turning, place)
        got = rope_and_store(qkv, rows, positions, heads, turning, cache)
        wrong = error(expected, got), error(place.layer, cache.layer)
        good &= say("rope and store", max(wrong) < 2e-3, error=max(wrong))
    return good


def exact(queries: Tensor, heads: Heads, place: Paging, line: int, token: int, position: int) -> Tensor:
    """One query in fp64."""
    dim, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
    blocks = place.tables[line, : position // 128 + 1].long()
    cached = place.layer[blocks].transpose(0, 1).reshape(2, -1, heads.num_kv_heads, dim)[:, : position + 1].double()
    q = queries[token].double().view(heads.num_kv_heads, group, dim)
    weights = (torch.einsum("kgd,nkd->kgn", q, cached[0]) * dim**-0.5).softmax(-1)
    return torch.einsum("kgn,nkd->kgd", weights, cached[1]).reshape(-1)


def check_attention() -> bool:
    """Single tokens at every awkward length, chunks, and the bits of every way to run them."""
    good = True
    for heads in (LLAMA, SMOL):
        lengths = (1, 2, 63, 64, 65, 127, 128, 255, 256, 257, 512, 1000, 1024, 4097, 8192, 131072)
        place = paged(heads, len(lengths), 1024)
        queries = bf16(len(lengths), heads.num_heads * heads.head_dim)
        tiles = torch.tensor(
            [(line, line - 1, 1, length - 1) for line, length in enumerate(lengths, 1)],
            dtype=torch.int32,
            device="cuda",
        )
        whole = attend(queries, tiles, heads, place)
        wrong = max(
            error(exact(queries, heads, place, line, line - 1, length - 1), whole[line - 1])
            for line, length in enumerate(lengths, 1)
        )
        same = {
            f"splits {n}": bool(torch.equal(whole, attend(queries, tiles, heads, place, splits=n))) for n in (2, 7, 32)
        }
        for name, shape in (("wide", Shape(128, 8, 3)), ("16 rows", Shape(16, 4, 3)), ("3 stages", Shape(64, 4, 3))):
            same[name] = bool(torch.equal(whole, attend(queries, tiles, heads, place, shape=shape)))
        required = all(same.values())
        good &= say("attention, single tokens", wrong < 1e-2 and required, error=wrong, same_bits=same)
        for shape in (CHUNK, Shape(128, 8, 3)):
            tokens, before = 301, 700
            queries = bf16(tokens, heads.num_heads * heads.head_dim)
            most = tokens_per_tile(heads, shape)
            chunk = torch.tensor(
                [(3, at, min(most, tokens - at), before + at) for at in range(0, tokens, most)],
                dtype=torch.int32,
                device="cuda",
            )
            got = attend(queries, chunk, heads, place, shape=shape)
            singles = torch.tensor([(3, at, 1, before + at) for at in range(tokens)], dtype=torch.int32, device="cuda")
            alone = attend(queries, singles, heads, place, splits=3)
            wrong = max(error(exact(queries, heads, place, 3, at, before + at), got[at]) for at in (0, 17, 300))
            bits = bool(torch.equal(got, alone))
            good &= say(
                "attention, a chunk", wrong < 1e-2 and bits, rows=shape.rows, error=wrong, chunk_equals_singles=bits
            )
    return good


def check_linear() -> bool:
    good = True
    for columns, depth in ((6144, 4096), (4096, 14336), (960, 576)):
        x, weight = bf16(200, depth), bf16(columns, depth, scale=depth**-0.5)
        reference = x.double() @ weight.double().T
        results = [linear(x, weight, wide=True, tile=tile) for tile in TILES]
        wrong = max(error(reference, each) for each in results)
        same = [bool(torch.equal(results[0], each)) for each in results]
        few = [bool(torch.equal(results[0][:3], linear(x[:3], weight, wide=True, tile=tile))) for tile in TILES]
        good &= say("linear", wrong < 1e-5 or depth > 4096, error=wrong, tiles_equal_the_first=same, three_rows=few)
        gated = weight[: columns // 2 * 2].contiguous()
        fused = linear_swiglu(x, gated, tile=Tile(64, 32, 64, 4, 4))
        good &= say("linear and swiglu", bool(torch.equal(fused, swiglu(linear(x, gated)))))
        good &= say("library", error(reference, library_linear(x, weight, wide=True)) < 1e-4)
    return good


WAYS = (
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.0, top_k=1, seed=4),
    SamplingParams(temperature=1.0, top_k=7, seed=2**64 - 1),
    SamplingParams(temperature=1.5, top_k=4096, seed=5),
    SamplingParams(temperature=0.9, top_p=0.6, seed=11),
    SamplingParams(temperature=2.0, top_p=0.999, seed=12),
    SamplingParams(temperature=1.0, top_p=1e-6, seed=13),
    SamplingParams(temperature=1.0, min_p=0.2, seed=1),
    SamplingParams(temperature=0.8, top_k=100, top_p=0.9, min_p=0.01, seed=9),
    SamplingParams(temperature=0.0),
)
VOCABULARIES = (321, 9001, 49_152, 128_256)
_REPEATS = 6


def asked_of(params: list[SamplingParams], positions: list[int], device: str) -> Tensor:
    """What the sampler is told of each row, as its docstring has it."""
    logs = [math.log(each.min_p) if each.min_p else -math.inf for each in params]
    floats = np.array([[each.temperature for each in params], [each.top_p for each in params], logs], np.float64)
    keys = np.array([[noise_key(each.seed, at) for each, at in zip(params, positions, strict=True)]], np.uint64)
    counts = np.array([[each.top_k for each in params], [-1] * len(params)], np.int64)
    asked = np.concatenate([floats.view(np.int64), keys.view(np.int64), counts])
    assert len(asked) == NUM_ASKED
    return torch.from_numpy(asked).to(device)


def logits_of(kind: str, rows: int, vocabulary: int) -> Tensor:
    """[rows, vocabulary] fp32 on the CPU."""
    made = torch.randn(rows, vocabulary) * 2
    if kind == "ties":
        return (made * 2).round() / 2
    if kind == "masked":
        made[:, ::3] = -math.inf
    return made * 6 if kind == "peaks" else made


def check_sampler(device: str = "cuda", vocabularies: tuple[int, ...] = VOCABULARIES) -> bool:
    """Every way to cut, several rows of each, beside the host's sampler."""
    good, params = True, [each for each in WAYS for _ in range(_REPEATS)]
    for vocabulary in vocabularies:
        for kind in ("plain", "ties", "peaks", "masked"):
            logits = logits_of(kind, len(params), vocabulary)
            positions = [int(at) for at in torch.randint(0, 100_000, (len(params),))]
            features = Features(noise=True, top_k=True, top_p=True, min_p=True)
            drawn = draw(logits.to(device), asked_of(params, positions, device), features)
            chosen = sample(logits, [Draw(each, at) for each, at in zip(params, positions, strict=True)])
            expected, got = [each.token_id for each in chosen], drawn.token_ids.tolist()
            others = [
                {"row": row, "sampling": repr(params[row]), "host": a, "device": b}
                for row, (a, b) in enumerate(zip(expected, got, strict=True))
                if a != b
            ]
            is_good = not others and not bool(drawn.problems.any())
            facts = {"vocabulary": vocabulary, "logits": kind, "rows": len(params), "differ": len(others)}
            good &= say("sampler", is_good, **facts, first=others[:3])
    return good


CHECKS: dict[str, Callable[[], bool]] = {
    "rows": check_rows,
    "rope": check_rope,
    "attention": check_attention,
    "linear": check_linear,
    "sampler": check_sampler,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(CHECKS), action="append")
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json, which is written after each check")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "gpu_check", "skipped": "there is no GPU here"}))
        return 2
    torch.manual_seed(torch.seed() % 1000)
    bad = 0
    for name in asked.only or CHECKS:
        try:
            bad += not CHECKS[name]()
        except Exception as error:  # the next check says more than none  # noqa: BLE001 - reported, and counted
            say(name, False, failed=f"{type(error).__name__}: {str(error)[-300:]}")
            traceback.print_exc(limit=4)
            bad += 1
        if asked.out:
            asked.out.mkdir(parents=True, exist_ok=True)
            document = {"machine": machine(), "command": "python -m bench.gpu_check", "checks": _said}
            (asked.out / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
