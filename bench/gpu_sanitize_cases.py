"""What is a small run of every GPU kernel, dense ones through a whole tiny model, V4.1's by the cases of its check?

Everything also runs on a CPU, by the kernels' twins: so the inputs are known to be right where there is no GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.engine_models import write_model
from bench.gpu_dense_step import Model as OneKernelModel
from bench.gpu_v41_cases import FAMILIES, Draw, moved
from kernels.batch import PENDING, Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.models.config import read_config
from kernels.models.gpu.dense import GpuDense, OpenedGpuDense
from kernels.models.gpu.weights import load_weights
from kernels.models.weights import open_weights
from kernels.ops import gpu_dense_fp8
from kernels.ops.gpu_attention import CHUNK, LONG_PART_TOKENS, SINGLE, attend, tokens_per_tile
from kernels.ops.gpu_bring import bring
from kernels.ops.gpu_fp8 import gathered, span_rows
from kernels.ops.gpu_grouped import fp4_weights
from kernels.ops.gpu_grouped_packed import CUT, MANY, multiply_gated
from kernels.ops.gpu_grouped_unpack import Packed, powers_of
from kernels.ops.gpu_index import score, score_candidates, select
from kernels.ops.gpu_linear import linear, linear_parts, linear_swiglu
from kernels.ops.gpu_placed_rows import place_rows
from kernels.ops.gpu_rope_cache import Heads, Paging
from kernels.ops.gpu_router import Placed, route_rows
from kernels.ops.gpu_sparse import attend as attend_v41
from kernels.ops.gpu_step import move_back
from kernels.ops.gpu_swiglu_rows import swiglu_rows, weigh_rows
from kernels.ops.gpu_told import Given, Numbers, tell_half, tell_step
from kernels.ops.gpu_varlen import lay_out
from kernels.ops.gpu_verify import Standing, accept

TINY: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1500,
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 320,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=1, top_k=20, top_p=0.9, min_p=0.01, num_logprobs=3),
    SamplingParams(temperature=1.0, seed=2, repetition_penalty=1.2, presence_penalty=0.3, logit_bias=((7, 2.0),)),
)
_BLOCKS, _PER_TABLE = 40, 8


def dense_model(device: str, *, invariant: bool) -> None:
    """Prompts in chunks beside decode rows, steps run ahead, every kind of draw; without graphs."""
    with tempfile.TemporaryDirectory(prefix="fathom-sanitize-") as scratch, torch.inference_mode():
        folder = write_model(TINY, Path(scratch), seed=0, dtype=torch.bfloat16)
        executor = _executor(folder, torch.device(device), invariant=invariant)
        ids = [(index * 37 + 11) % 1500 for index in range(200)]
        tables = [range(1 + index * _PER_TABLE, 1 + (index + 1) * _PER_TABLE) for index in range(len(_PARAMS))]
        lengths = (200, 3, 129)
        mask = bytes([0xFF] * 188)
        rows = [
            Row(index, ids[:length], 0, tables[index], params, ids[:length], length)
            for index, (length, params) in enumerate(zip(lengths, _PARAMS, strict=True))
        ]
        running = executor.launch(Batch(tuple(rows)))
        for step in range(3):
            mixed = [Row(9, ids[step * 5 : step * 5 + 5], step * 5, (33,))] if step == 1 else []
            rows = [
                Row(
                    index,
                    (PENDING,),
                    length + step,
                    tables[index],
                    params,
                    ids[:length],
                    length,
                    allowed_mask=mask if index == 2 else None,
                )
                for index, (length, params) in enumerate(zip(lengths, _PARAMS, strict=True))
            ]
            launched = executor.launch(Batch((*rows, *mixed)))
            executor.collect(running)
            running = launched
        executor.collect(running)


def _executor(folder: Path, device: torch.device, *, invariant: bool) -> Executor:
    def silent(_stage: str, _done: int, _total: int) -> None:
        """Nobody asked."""

    opened = OpenedGpuDense(folder, block_tokens=32, device=device, progress=silent)
    config = read_config(folder)
    weights = load_weights(config, open_weights(folder, silent), device, silent)
    model = GpuDense(config, weights, opened.layout, _BLOCKS, device, invariant=invariant, graphs=False)
    return Executor(
        model,
        model_dir=folder,
        num_blocks=_BLOCKS,
        num_windows=0,
        replay="off",
        threads=1,
        weights_digest=b"tiny",
        invariant=invariant,
    )


def dense_forms(device: str) -> None:
    """What the tiny model does not ask for: windows, sinks, shared keys, parts; wide products; both ways to choose."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    heads, count, before = Heads(8, 2, 64), 33, 300
    place = Paging(noise(12, 2, 32, 128), torch.arange(24, device=device).int().view(2, 12) % 12)
    queries, sinks = noise(count, 8 * 64), torch.randn(8, generator=generator).to(device)
    most = tokens_per_tile(heads, CHUNK)
    chunk = [(1, at, min(most, count - at), before + at) for at in range(0, count, most)]
    single = [(1, at, 1, before + at) for at in range(count - 1)] + [(0, count - 1, 0, 0)]
    chunk_tiles, single_tiles = (torch.tensor(each, device=device).int() for each in (chunk, single))
    for see in (attend, partial(attend, window=100, sinks=sinks)):
        see(queries, chunk_tiles, heads, place, shape=CHUNK)
        for splits in (1, 3):
            see(queries, single_tiles, heads, place, splits=splits, shape=SINGLE, part=LONG_PART_TOKENS)
    for rows in (1, 17, 65, 300):
        x, weight = noise(rows, 192), noise(200, 192)
        linear(x, weight)
        linear(x, weight, wide=True)
        if rows <= 256:
            linear_swiglu(x, weight)
        if rows <= 16:
            linear_parts(x, weight, parts=3)
    scores, seen = noise(3, 4000), torch.tensor([4000, 37, 0], device=device).int()
    for each in (scores, scores[:, :3999].contiguous()):
        select(each, seen, count=100)


def v41_family(family: str, device: str) -> None:
    """All cases of a family, their twins' inputs."""
    for case in FAMILIES[family](Draw(1)):
        args, named = moved(case.args, device), {name: moved(each, device) for name, each in case.named.items()}
        case.run(*args, **named)


def v41_few_heads(device: str) -> None:
    """Attention and scores of 16 heads: what other GPUs run, for Hopper has kernels of its own for V4.1's heads."""
    for family in ("attention", "index"):
        for case in FAMILIES[family](Draw(1)):
            if case.run not in {attend_v41, score, score_candidates}:
                continue
            queries, *others = case.args
            at = -1 if case.run is attend_v41 else 0
            others[at] = others[at][..., :16].contiguous()  # sinks, or weights
            args = (queries[:, :16].contiguous(), *others)
            named = {name: moved(each, device) for name, each in case.named.items()}
            case.run(*moved(args, device), **named)


def v41_rows_at_once(device: str) -> None:
    """What the families leave out: slots placed with their rows, rows turned, routes, wide rows, a dense product."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    tokens, width, slots = 33, 2304, 33 * 6
    experts = torch.rand(tokens, 7, generator=generator).topk(6, dim=1).indices.int().to(device)
    place_rows(experts, span_rows(noise(tokens, 5120).bfloat16()), num_experts=7, turns=True)
    targets = torch.randperm(slots, generator=generator).int().to(device)
    swiglu_rows(noise(slots, 2 * width).bfloat16(), targets, noise(slots).abs(), limit=10.0, turns=True)
    weigh_rows(noise(slots, width).bfloat16(), targets, noise(slots).abs(), turns=True)
    for rows in (256, 200):
        x, matrix = (span_rows(noise(count, 1280).bfloat16()) for count in (rows, 384))
        gpu_dense_fp8.multiply(x.data, x.scale[0], matrix.data, matrix.scale[0])
    router, bias = noise(384, 1280).bfloat16(), noise(384)
    for rows in (3, 33, 200, 1030):
        placed = Placed(torch.arange(384, device=device).int(), torch.zeros(rows, device=device).int())
        route_rows(noise(rows, 1280).bfloat16(), router, bias, None, None, placed, top_k=6, scaling=1.5)
    scores, seen = noise(3, 65_536).bfloat16(), torch.tensor([65_536, 37, 0], device=device).int()
    select(scores, seen, count=512)
    v41_told(device)


def v41_told(device: str) -> None:
    """Two sequences and padding, in both halves' forms; and bytes that are asked for ahead."""
    with torch.device(device):
        said = torch.tensor([[5, 3, 0], [5, 3, 0], [21, 300, 0], [1, 2, 0], [2, 1, 0], *[[0, 200, 0]] * 3]).int()
        turn = torch.zeros(301, 32)
        given = Given(said, torch.arange(-4, 6).int(), torch.arange(4).int(), torch.zeros(3, 3).int(),
                      torch.ones(3, 3).int(), (turn, turn, turn, turn))  # fmt: skip
        numbers, every = Numbers(99, 128, 134, 7, 128, (1, 2), 8), torch.arange(10)
        layout = lay_out(said[0], said[2], num_tokens=10, tile_tokens=4)
        tell_step(given, layout, numbers, every, every)
        tell_half(given, layout, numbers, every[:7], is_decoder=True)
        bring(torch.zeros(70_001, dtype=torch.uint8))


def v41_gated(device: str) -> None:
    """Experts whose product gates: none, one, a few and many rows, a last round shared, tiles of 288."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (5, 256, 192), generator=generator, dtype=torch.uint8)
    scale = torch.randint(117, 120, (5, 256, 12), generator=generator, dtype=torch.uint8)
    weights = fp4_weights(data.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    up = moved(Packed(weights, powers_of(weights), None).interleaved(), device)
    ends, positions = torch.tensor([0, 1, 38, 350, 611]).int().to(device), torch.arange(613).to(device)
    x = gathered(span_rows(torch.randn(613, 384, generator=generator).to(device)), positions, turns=True)
    for cut in (None, CUT, MANY):
        multiply_gated(x, up, ends, limit=10.0, cut=cut)


def one_kernel(device: str) -> None:
    """A layer of Llama-8B's shape for two sequences."""
    with torch.device(device):
        OneKernelModel(1, [70, 129]).one_kernel(2, head=False)()


def drafts(device: str) -> None:
    """Three rows with two drafts each, none, one and all of them right; the next step goes on from two."""
    with torch.device(device):
        rows = torch.tensor([[0, 3, 6], [3, 3, 3], [0, 3, 6]], dtype=torch.int32)
        history = torch.randint(0, 50, (9, 4))
        choices = torch.zeros(2, 9, dtype=torch.int32)
        for row, right in enumerate((0, 1, 2)):
            choices[0, 3 * row : 3 * row + right] = history[3 * row + 1 : 3 * row + 1 + right, 0].int()
            choices[0, 3 * row + right] = 77
        newest, problems, rejected = (torch.zeros(4, dtype=torch.int32) for _ in range(3))
        standing = Standing(newest, problems, rejected, torch.zeros(4, 3, dtype=torch.int32))
        earlier = torch.tensor([0, -1, 2], dtype=torch.int32)
        accept(choices, history, rows, standing)
        move_back(torch.tensor([9, 9, 9]).int(), torch.zeros(3, 3).int(), earlier, standing.rejected, standing.before)


RUNS: dict[str, Callable[[str], None]] = {
    "dense model, invariant": partial(dense_model, invariant=True),
    "dense model, fastest": partial(dense_model, invariant=False),
    "dense forms": dense_forms,
    "dense, one kernel": one_kernel,
    **{f"v41 {family}": partial(v41_family, family) for family in FAMILIES},
    "v41 few heads": v41_few_heads,
    "v41 rows at once": v41_rows_at_once,
    "v41 gated": v41_gated,
    "drafts": drafts,
}
