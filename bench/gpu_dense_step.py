"""Is a decode step of all layers in one kernel right on this GPU, and how fast beside a kernel for each product?

    python -m bench.gpu_dense_step                # checks, then times; also: --only check, --only time, --ways 5/2

A way of fetching is a ring's units / those on their way at most, by a warp of its own; without a way, the product's.

Llama-8B's shape with random bf16 weights. Both halves run in processes of their own that end after a while (four
minutes for both): a kernel whose programs wait for each other may wait for ever where nobody has tried it. One JSON
line a figure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_shapes import GPU_SHAPES
from bench.gpu_time import event_seconds, machine
from kernels.models.config import parse_config
from kernels.models.gpu.forward import Stack, Tokens
from kernels.models.gpu.weights import GpuLayer, GpuWeights
from kernels.models.layers import rope_table
from kernels.ops.gpu_attention import FULL_PROGRAMS, part_tokens
from kernels.ops.gpu_layer_cut import Cut, cut_for
from kernels.ops.gpu_layers import Scratch, Stacks, run_layers
from kernels.ops.gpu_linear import library_linear
from kernels.ops.gpu_rope_cache import Paging, Turning

CONFIG = parse_config(GPU_SHAPES["llama-8b"], {})
_BLOCK = 128
_MOST_SPLITS = 32
_PATIENCE_SECONDS = {"check": 100, "time": 150}
_WAYS = "5/5,5/3,5/2"
_CHECKED = "5/2"
_HEAD_BYTES = CONFIG.vocab_size * CONFIG.hidden_size * 2
_LAYER_BYTES = 2 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)


def say(**facts: Any) -> None:
    print(json.dumps({"bench": "gpu_dense_step"} | facts), flush=True)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)


class Model:
    """Some layers, their blocks, and a step's tokens, on the device that is in force."""

    def __init__(self, num_layers: int, contexts: list[int]) -> None:
        self.config = replace(CONFIG, num_layers=num_layers)
        hidden, ffn = CONFIG.hidden_size, CONFIG.ffn_size
        qkv, output = random(num_layers, 6144, hidden), random(num_layers, hidden, hidden)
        gate_up, down = random(num_layers, 2 * ffn, hidden), random(num_layers, hidden, ffn)
        norms = 1 + 0.1 * torch.randn(2 * num_layers + 1, hidden, dtype=torch.bfloat16)
        embedding = torch.randn(CONFIG.vocab_size, hidden, dtype=torch.bfloat16)
        self.head = random(CONFIG.vocab_size, hidden)
        with torch.device("cpu"):
            cos, sin = rope_table(CONFIG)
        self.turning = Turning(cos.to(embedding.device), sin.to(embedding.device))
        layers = tuple(
            GpuLayer(norms[2 * at], norms[2 * at + 1], qkv[at], output[at], None, gate_up[at], down[at], self.turning)
            for at in range(num_layers)
        )
        self.weights = GpuWeights(embedding, layers, norms[-1], self.head)
        self.stacks = Stacks(
            qkv.view(-1, hidden),
            output.view(-1, hidden),
            gate_up.view(-1, hidden),
            down.view(-1, ffn),
            norms,
            embedding,
        )
        needed = [context // _BLOCK + 1 for context in contexts]
        most = max(needed)
        self.cache = random(1 + len(contexts) * most, num_layers, 2, _BLOCK, 1024).mul_(32)
        tables = torch.zeros(len(contexts) + 1, most, dtype=torch.int32)
        tables[1:] = (1 + torch.randperm(len(contexts) * most)).view(-1, most).int()
        self.tables = tables
        self.contexts = contexts
        self.ids = torch.randint(0, CONFIG.vocab_size, (len(contexts),))
        self.rows = torch.arange(1, len(contexts) + 1, dtype=torch.int32)
        self.positions = torch.tensor(contexts, dtype=torch.int32) - 1
        self.paging = [Paging(self.cache[:, at], tables) for at in range(num_layers)]

    def of(self, count: int, context: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        positions = self.positions[:count] if context is None else torch.full_like(self.positions[:count], context - 1)
        return self.ids[:count], self.rows[:count], positions

    def cut(self, count: int) -> Cut:
        made = cut_for(
            count,
            layers=self.config.num_layers,
            hidden=CONFIG.hidden_size,
            heads=CONFIG.num_heads,
            kv_heads=CONFIG.num_kv_heads,
            head_dim=CONFIG.head_dim,
            ffn=CONFIG.ffn_size,
            block_tokens=_BLOCK,
        )
        assert made is not None
        return made

    def kernel_each(self, count: int, context: int | None = None, *, head: bool = True) -> Callable[[], Tensor]:
        """The step as it is: a kernel for each product."""
        ids, rows, positions = self.of(count, context)
        ones = torch.ones_like(rows)
        tiles = torch.stack([rows, torch.arange(count).int(), ones, positions], 1).contiguous()
        splits = min(_MOST_SPLITS, -(-FULL_PROGRAMS // (count * CONFIG.num_kv_heads)))
        part = part_tokens(count, CONFIG.num_kv_heads, 2048)
        weights = self.weights if head else replace(self.weights, head=torch.eye(CONFIG.hidden_size).bfloat16())
        stack = Stack(self.config, weights, self.paging, invariant=False)
        return partial(stack.forward, Tokens(ids, rows, positions, tiles, splits, part=part))

    def one_kernel(
        self, count: int, context: int | None = None, *, cut: Cut | None = None, head: bool = True
    ) -> Callable[[], Tensor]:
        ids, rows, positions = self.of(count, context)
        cut = cut or self.cut(count)
        scratch = Scratch.of(cut, ids.device)

        def step() -> Tensor:
            x = run_layers(
                ids,
                rows,
                positions,
                self.stacks,
                self.turning,
                self.paging,
                scratch,
                cut,
                eps=CONFIG.norm_eps,
            )
            return library_linear(x, self.head, wide=True) if head else x

        return step


def error(expected: Tensor, got: Tensor) -> float:
    return float((expected.double() - got.double()).norm() / expected.double().norm())


def attempt(name: str, call: Callable[[], None]) -> None:
    """A variant that fails hides no other."""
    try:
        call()
    except Exception as problem:  # noqa: BLE001 - a variant that does not run is a result
        say(variant=name, ok=False, problem=str(problem)[-600:], trace=traceback.format_exc()[-600:])


def check(ways: list[str]) -> None:  # noqa: ARG001 - all of them are the same code
    """Two layers: against a kernel each, keys and values too, the same bits fifty times, padding."""
    model = Model(2, [1, 64, 65, 1000, 1024, 8192, 129, 4096])
    for way in (None, _CHECKED):
        for count in (1, 8):
            attempt(f"check {way} {count}", partial(check_rows, model, count, way=way))
    attempt("check padded", partial(check_rows, model, 3))
    attempt("check long", partial(check_rows, model, 1, 8192))


def fetching(cut: Cut, way: str | None) -> Cut:
    """The cut, with units fetched in this way."""
    if way is None:
        return cut
    stages, near = map(int, way.split("/"))
    return replace(cut, stages=stages, near=near, has_feeder=True)


def check_rows(model: Model, count: int, context: int | None = None, *, way: str | None = None) -> None:
    before = model.cache.clone()
    expected = model.kernel_each(count, context, head=False)().bfloat16()
    kept = model.cache.clone()
    model.cache.copy_(before)
    step = model.one_kernel(count, context, cut=fetching(model.cut(count), way), head=False)
    got = step()
    torch.cuda.synchronize()
    wrong, wrong_kept = error(expected, got), error(kept, model.cache)
    each = [error(a, b) for a, b in zip(expected, got, strict=True)]
    same = all(torch.equal(got, step()) for _ in range(50))
    ok = wrong < 0.02 and wrong_kept < 0.002 and same and bool(got.isfinite().all())
    facts = {"rows": count, "context": context, "way": way}
    say(check="one kernel", ok=ok, error=wrong, kept_error=wrong_kept, same_bits=same, **facts)
    if not ok:
        say(check="by row", errors=each, kept_rows=int(kept.ne(before).any(-1).sum()))
        say(check="by row", own_rows=int(model.cache.ne(before).any(-1).sum()))
    model.cache.copy_(before)


def step_seconds(call: Callable[[], object]) -> float:
    """Of a captured step, several one after the other."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def several() -> None:
        for _ in range(4):
            graph.replay()

    return event_seconds(several, repeats=5) / 4


def tell(model: Model, name: str, count: int, context: int, call: Callable[[], object], *, head: bool = True) -> None:
    seconds = step_seconds(call)
    size = model.config.num_layers * (_LAYER_BYTES + count * context * 4096) + (_HEAD_BYTES if head else 0)
    say(
        variant=name,
        rows=count,
        context=context,
        ms=round(seconds * 1e3, 4),
        layer_us=None if head else round(seconds / model.config.num_layers * 1e6, 2),
        tokens_per_second=round(count / seconds, 1) if head else None,
        tb_per_second=round(size / seconds / 1e12, 3),
    )


def time_steps(ways: list[str]) -> None:
    """A kernel for each product beside one kernel, and its layers alone in each way of fetching."""
    model = Model(CONFIG.num_layers, [8192] * 8)
    shapes = ((1, 1024), (8, 8192))
    for count, context in shapes:
        attempt("kernel each", lambda: tell(model, "kernel each", count, context, model.kernel_each(count, context)))  # noqa: B023 - called at once
        attempt("one kernel", lambda: tell(model, "one kernel", count, context, model.one_kernel(count, context)))  # noqa: B023 - called at once
    # A way that hangs ends this process: those before it are told by then.
    for way in (None, *ways):
        for count, context in shapes:
            call = model.one_kernel(count, context, cut=fetching(model.cut(count), way), head=False)
            name = f"layers {way or 'as frozen'}"
            attempt(name, lambda: tell(model, name, count, context, call, head=False))  # noqa: B023 - called at once
    for count, context in shapes:
        attempt("agreement", partial(compare, model, count, context))


def compare(model: Model, count: int, context: int) -> None:
    """Logits after all layers: random weights grow what rounding differs by, so this is told, not judged."""
    model.cache.normal_()
    expected = model.kernel_each(count, context)()
    got = model.one_kernel(count, context)()
    same = bool(torch.equal(got, model.one_kernel(count, context)()))
    agree = int((expected.argmax(-1) == got.argmax(-1)).sum())
    say(agreement=agree, rows=count, context=context, error=error(expected, got), same_bits=same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(_PATIENCE_SECONDS))
    parser.add_argument("--ways", default=_WAYS)
    asked = parser.parse_args()
    if asked.only:
        say(machine=machine())
        with torch.inference_mode(), torch.device("cuda"):
            {"check": check, "time": time_steps}[asked.only](asked.ways.split(","))
        return 0
    became = 0
    for part, seconds in _PATIENCE_SECONDS.items():
        command = [sys.executable, "-m", "bench.gpu_dense_step", "--only", part, "--ways", asked.ways]
        try:
            subprocess.run(command, timeout=seconds, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as problem:
            say(part=part, ok=False, problem=str(problem))
            became = 1
    return became


if __name__ == "__main__":
    sys.exit(main())
