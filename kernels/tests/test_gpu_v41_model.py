"""V4.1 behind the executor as a GPU runs it: run ahead, drawn on the device, planned for memory; here by twins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from bench import gpu_v41_step
from bench.gpu_v41_model import give_past
from bench.gpu_v41_step import drafts_step
from kernels.batch import PENDING, Batch, Replay, Row, SamplingParams
from kernels.executor import Executor
from kernels.memory_plan import NoRoom
from kernels.models.config import ModelNotSupported
from kernels.models.deepseek_v41 import OpenedV41
from kernels.models.gpu.v41.expert_weights import Placement
from kernels.models.gpu.v41.graphs import contexts_up_to
from kernels.models.gpu.v41.layer import experts as experts_of
from kernels.models.gpu.v41.memory import choose_experts, table_bytes, v41_need, weight_bytes
from kernels.models.gpu.v41.opened import OpenedGpuV41, check_supported
from kernels.models.gpu.v41.weights import GpuV41Weights, Loader
from kernels.models.load import open_model
from kernels.models.model import BadBatch, Dtype
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import read_v41_config
from kernels.ops import gpu_dense_fp8
from kernels.ops.gpu_fp8 import RowScaled
from kernels.ops.gpu_grouped_unpack import Packed
from kernels.ops.gpu_hyper import enter
from kernels.tests.gpu_v41_rig import DEVICE, PLAIN, begin, compute, gpu_model, opened, records
from kernels.tests.shallow_v41 import shallow_v41
from kernels.tests.v41_rig import BLOCKS_EACH, IDS, WINDOWS, blocks_of, model_of, row_of

GREEDY = SamplingParams(temperature=0.0)
PARAMS = (GREEDY, SamplingParams(temperature=0.9, seed=5), SamplingParams(repetition_penalty=1.2, seed=3))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Caches made in inference mode are written in it only."""
    with torch.inference_mode():
        yield


def executor() -> Executor:
    return Executor(
        gpu_model(),
        model_dir=shallow_v41(),
        num_blocks=1 + WINDOWS * BLOCKS_EACH,
        num_windows=1 + WINDOWS,
        replay="off",
        threads=1,
        weights_digest=bytes(32),
    )


def row(sequence: int, tokens: list[int], start: int, *, count: int | None = None, prompt: int = 0) -> Row:
    """Tokens from `start` on, sampled; count: of those the last may be PENDING."""
    made = row_of(tokens, start, len(tokens) if count is None else start + count, sequence=sequence)
    return replace(made, sampling=PARAMS[sequence - 1], history=tokens, num_prompt_tokens=prompt)


def answers(device: Executor, prompts: list[list[int]], steps: int, *, is_ahead: bool) -> list[list[int]]:
    """What each sequence goes on with; sequence n is the nth prompt."""
    begin(*range(1, len(prompts) + 1))
    known = [list(prompt) for prompt in prompts]
    batch = [row(index + 1, prompt, 0, prompt=len(prompt)) for index, prompt in enumerate(prompts)]
    running = device.launch(Batch(tuple(batch)))
    for step in range(steps):
        if is_ahead:
            batch = []
            for index, (prompt, so_far) in enumerate(zip(prompts, known, strict=True)):
                at = len(prompt) + step
                batch.append(replace(row(index + 1, [*so_far, PENDING], at, prompt=len(prompt)), history=so_far))
            launched = device.launch(Batch(tuple(batch)))
        for so_far, sampled in zip(known, device.collect(running), strict=True):
            so_far.append(sampled.token_id)
        if not is_ahead:
            batch = [
                row(index + 1, so_far, len(so_far) - 1, prompt=len(prompts[index]))
                for index, so_far in enumerate(known)
            ]
            launched = device.launch(Batch(tuple(batch)))
        running = launched
    for so_far, sampled in zip(known, device.collect(running), strict=True):
        so_far.append(sampled.token_id)
    return known


@pytest.mark.slow
def test_a_step_can_be_launched_before_the_last_ones_tokens_are_known() -> None:
    """Greedy, drawn, and penalised sequences: tokens and records equal those of the loop that waits."""
    prompts = [IDS[:17], IDS[7:40], IDS[3:12]]
    device = executor()
    assert device.runs_ahead
    expected = answers(device, prompts, 3, is_ahead=False)
    kept = [records(sequence, 40) for sequence in (1, 2, 3)]
    assert expected == answers(device, prompts, 3, is_ahead=True)
    assert kept == [records(sequence, 40) for sequence in (1, 2, 3)]


@pytest.mark.slow
def test_a_finished_sequences_dropped_step_leaves_its_window_to_others() -> None:
    """A step that was launched before the answer's end was known; its slot and blocks then start anew."""
    device = executor()
    begin(1, 2)
    expected = device.collect(device.launch(Batch((row(2, IDS[:20], 0),))))[0].token_id
    begin(1, 2)
    running = device.launch(Batch((row(1, IDS[9:30], 0),)))
    dropped = device.launch(Batch((replace(row(1, [*IDS[9:30], PENDING], 21), history=()),)))
    device.collect(running)
    device.collect(dropped)
    begin(1)
    again = replace(row(2, IDS[:20], 0), window=1, block_table=blocks_of(1))
    assert expected == device.collect(device.launch(Batch((again,))))[0].token_id


@pytest.mark.slow
def test_greedy_tokens_are_the_cpus_where_they_are_no_tie() -> None:
    """The answer goes on with the CPU's tokens."""
    plain, model = model_of(PLAIN), gpu_model()
    begin(1)
    tokens, start, told_apart = IDS[:30], 0, 0
    for _ in range(7):
        rows = (row_of(tokens, start, len(tokens)),)
        logits = plain.forward(Batch(rows), every_row=True)[0]
        got = model.forward(Batch(rows), every_row=True)[0]
        (best, second), (expected, _) = (each.tolist() for each in logits.topk(2))
        if best - second > (0.1 if DEVICE.type == "cpu" else 1.5):  # kernels round otherwise, and fp8 amplifies it
            told_apart += 1
            assert expected == int(got.argmax())
        tokens, start = [*tokens, expected], len(tokens)
    if DEVICE.type == "cpu":
        assert told_apart > 3


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    """Before anything changes: tokens that nobody draws, unknown tokens before them, windows of others or behind."""
    model = gpu_model()
    begin(1, 2)
    compute(row_of(IDS, 0, 9))
    before = records(1, 9)
    bad = {
        "samples no token": replace(row_of([*IDS[:9], PENDING], 9, 10), sequence=77),
        "only a row's own token": row_of([*IDS[:8], PENDING, 5], 9, 10),
        "token ids": row_of([*IDS[:9], PENDING, PENDING], 9, 11),
        "its window ends": row_of(IDS, 12, 13),
        "window slots": replace(row_of(IDS, 9, 10), window=99),
        "block ids": replace(row_of(IDS, 9, 10), block_table=(0,)),
        "window_from": row_of(IDS, 9, 10, replay=Replay(window_from=11)),
    }
    for message, wrong in bad.items():
        with pytest.raises(BadBatch, match=message):
            model.forward(Batch((wrong,)), every_row=True)
    with pytest.raises(BadBatch, match="another row"):
        model.forward(Batch((row_of(IDS, 9, 10), replace(row_of(IDS, 9, 10, sequence=2), window=1))), every_row=True)
    assert before == records(1, 9)
    compute(row_of(IDS, 9, 10))


@pytest.mark.slow
def test_scores_and_late_masks_are_heeded() -> None:
    """Targets' logprobs beside a sampled row, and a mask that comes while the step runs."""
    device = executor()
    begin(1, 2)
    scored = replace(row_of(IDS, 0, 6, sequence=2), targets=IDS[1:6])
    step = device.launch(Batch((row(1, IDS[:9], 0), scored)))
    (free,) = device.collect(step)
    assert 0 <= free.token_id < 320
    assert IDS[1:6] == [each.token_id for each in device.score(step)[2]]
    begin(1)
    mask = bytearray(40)
    mask[5] = 0b100
    (masked,) = device.collect(device.launch(Batch((row(1, IDS[:9], 0),))).with_masks({1: bytes(mask)}))
    assert 42 == masked.token_id


def tensors_of(made: object) -> Iterator[Tensor]:
    """Every tensor in a tree of dataclasses."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, tuple):
        for each in made:
            yield from tensors_of(each)
    else:
        for name in getattr(made, "__slots__", ()):
            yield from tensors_of(getattr(made, name))


def load_weights(**named: object) -> GpuV41Weights:
    config = read_v41_config(shallow_v41())
    return Loader(config, Checkpoint(shallow_v41(), config), DEVICE, **named).load()  # type: ignore[arg-type] # test's own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "is_invariant", "dense_in_fp8"),
    [("fp4", True, False), ("fp4", True, True), ("bf16", True, False), ("fp8", True, False), ("fp8", False, True)],
)
def test_planned_bytes_are_what_the_weights_take(experts, is_invariant, dense_in_fp8, monkeypatch) -> None:
    """Within two percent: widths padded to the kernels' depth and little tables are not planned.

    In fp8 where the bits must not depend on the batch: as on the GPU that our own product is for.
    """
    if is_invariant and dense_in_fp8:
        monkeypatch.setattr(gpu_dense_fp8, "fits", lambda _, out, size: out % 128 == 0 == size % 128)
    made = load_weights(experts=experts, is_invariant=is_invariant)
    assert dense_in_fp8 == isinstance(made.layers[0].attention.wo_b, RowScaled)
    tables = {
        each.data_ptr() for layer in made.layers if (memory := layer.memory) for each in (memory.data, memory.scale)
    }
    taken = sum(each.nbytes for each in tensors_of(made) if each.data_ptr() not in tables)
    padding = sum(
        prod(each.data.shape) // 2 * each.data.itemsize + each.scale.nbytes // 2
        for layer in made.layers
        for each in (layer.moe.up, layer.moe.down)
        if not isinstance(each, Packed)
    )  # the tiny model's experts are half as wide as the kernels' depth
    modes = {"is_invariant": is_invariant, "dense_in_fp8": dense_in_fp8}
    planned = weight_bytes(gpu_model().info, experts, experts_here=8, **modes)
    assert abs(planned - (taken - padding)) < 0.02 * taken


def test_experts_are_wide_where_blocks_still_fit() -> None:
    """e4m3 while it leaves half of the blocks; else fp4; and an error that says what is missing where neither fits."""
    config, layout = gpu_model().info, gpu_model().layout
    named = {"step_tokens": 512, "num_windows": 9, "num_sequences": 64, "graph_sizes": (1, 2), "graph_contexts": (512,)}
    needs = {kind: v41_need(config, layout, kind, **named) for kind in ("fp4", "fp8")}  # type: ignore[arg-type] # kinds
    small, large = needs["fp4"].total, needs["fp8"].total
    spare = 3 << 30

    def kind(free: int, blocks: int | None) -> str:
        return choose_experts(needs, free=free, block_bytes=layout.block_bytes, num_blocks=blocks)[0]  # type: ignore[arg-type] # kinds

    assert small < large
    assert ("fp8", "fp8") == (kind(large + spare, 10), kind(large + spare, None))
    most = (large - small) // layout.block_bytes
    assert "fp4" == kind(small + (1 << 30) + (most + 4) * layout.block_bytes, most)
    with pytest.raises(NoRoom, match="weights"):
        kind(small // 2, None)


def test_more_windows_leave_fewer_blocks() -> None:
    """As many as the executor is told of are planned for, no fixed number of them."""
    config, layout = gpu_model().info, gpu_model().layout

    def blocks(windows: int) -> int:
        needs = {
            kind: v41_need(config, layout, kind, step_tokens=512, num_windows=windows, num_sequences=64)
            for kind in ("fp4", "fp8")
        }
        return choose_experts(needs, free=8 << 30, block_bytes=layout.block_bytes, num_blocks=None)[1].num_blocks  # type: ignore[arg-type] # kinds

    assert 1000 * layout.window_bytes // layout.block_bytes <= blocks(33) - blocks(1033) + 1


def test_n_gram_tables_are_counted_as_they_lie_in_the_host() -> None:
    """fp8 rows and their scales: 203 GB at the published size."""
    published = replace(gpu_model().info.engram, num_rows=(384_006_168, 384_016_682), head_dim=256)
    assert 203 == round(table_bytes(replace(gpu_model().info, engram=published)) / 1e9)
    held = [layer.memory for layer in gpu_model()._weights.layers if layer.memory]
    assert sum(each.data.nbytes + each.scale.nbytes for each in held) == table_bytes(gpu_model().info)


def test_a_gpu_runs_v41_in_bf16_only() -> None:
    """fp32 stays with plain torch: it is what others are compared with."""

    def kind(dtype: Dtype) -> type:
        return type(
            open_model(
                shallow_v41(),
                dtype=dtype,
                block_tokens=None,
                replay="off",
                device=torch.device("cuda"),
                progress=lambda *_: None,
            )
        )

    assert OpenedGpuV41 is kind("bf16")
    assert OpenedV41 is kind("fp32")
    assert opened().weights_digest() == OpenedV41(
        shallow_v41(), numerics=model_of(PLAIN).weights.numerics, block_tokens=None, device=DEVICE, progress=lambda *_: None
    ).weights_digest()  # fmt: skip
    with pytest.raises(ModelNotSupported, match="head_dim 96"):
        check_supported(replace(gpu_model().info, head_dim=96))


def test_contexts_are_few() -> None:
    """Steps are captured for a handful of lengths, the longest of which is the caches' own."""
    assert (512, 4096, 32_768, 262_144, 1_048_576) == contexts_up_to(512, 1_048_576)
    assert (512, 1000) == contexts_up_to(512, 1000)
    assert (300,) == contexts_up_to(512, 300)


@pytest.mark.slow
def test_ranks_that_share_the_experts_add_up_to_one_that_has_all() -> None:
    """Each adds its own experts' part; what experts elsewhere would add is left out."""
    model = gpu_model()
    begin(1)
    laid = model.lay(Batch((row_of(IDS, 0, 9),)))
    step, state = model.stack.begin(laid), model.stack.enter(laid)
    first = model.stack.layers[0]
    weights = first._weights
    entered = enter(state.streams, None, state.made, weights.ffn_mixing)
    whole = experts_of(step, model.info.moe, weights.moe, entered).float()
    parts = []
    for here in (range(5), range(5, 8)):
        places = tuple(index - here.start if index in here else -1 for index in range(8))
        made = load_weights(experts="fp4", placement=Placement(tuple(here), places)).layers[0].moe
        parts.append(experts_of(step, model.info.moe, made, entered).float())
    nobody = replace(weights.moe, rows=torch.full((8,), -1, dtype=torch.int32, device=DEVICE))
    shared = experts_of(step, model.info.moe, nobody, entered).float()
    assert (parts[0] + parts[1] - shared - whole).norm() < 0.02 * whole.norm()
    assert (parts[0] - whole).norm() > 0.1 * whole.norm()


@pytest.mark.slow
def test_the_benchmarks_step_is_one_that_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A past that nobody computed, drafts of every sequence, logits of all of them: finite, twice the same; run ahead."""
    device, model = executor(), gpu_model()
    give_past(model)
    step = drafts_step(model.info, requests=3, each=4, context=90)
    first = device.launch(step)
    logits = first.logits.clone()
    assert 3 == len(device.collect(first))
    assert [12, 320] == list(logits.shape)
    assert logits.isfinite().all()
    assert torch.equal(logits, device.launch(step).logits)
    monkeypatch.setattr(gpu_v41_step, "_AHEAD_STEPS", 3)
    assert 0 < gpu_v41_step.ahead(device, model.info, requests=2, drafts=3, context=90)
    begin(*range(1, WINDOWS + 1))
