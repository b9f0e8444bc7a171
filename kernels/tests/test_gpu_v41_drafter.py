"""The drafter as a GPU runs it, here by its kernels' twins, against golden answers and the CPU's drafter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.models.gpu.v41.drafter import DrafterLoader, GpuDrafter, Proposal
from kernels.models.gpu.v41.memory import weight_bytes
from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.step import Products
from kernels.models.gpu.v41.tokens import Turns
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.weights import ropes_of
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_records import Section
from kernels.ops.numerics import QUANT
from kernels.tests.golden_files import golden, golden_json, tiny_v41
from kernels.tests.test_drafter import Rig, make_rig, mates, shared, step_row, steps_of

CPU = torch.device("cpu")
POSITIONS = 400


def tensors_of(made: object) -> Iterator[Tensor]:
    """Every tensor in a tree of dataclasses."""
    if isinstance(made, Tensor):
        yield made
    for each in made if isinstance(made, tuple) else [getattr(made, name) for name in getattr(made, "__slots__", ())]:
        yield from tensors_of(each) if not isinstance(made, Tensor) else ()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """As the executor computes."""
    with torch.inference_mode():
        yield


@cache
def rig() -> Rig:
    """The CPU's, whose windows both drafters read."""
    return make_rig(QUANT)


@cache
def drafter() -> GpuDrafter:
    config = shared().config
    weights = DrafterLoader(config, Checkpoint(tiny_v41(), config), CPU, experts="bf16").load_drafter()
    pool = rig().rings[0]._records._view.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(pool)
    ring_bytes = len(raw) // 12 // config.drafter.num_layers
    record = ring_bytes // config.ring_tokens
    raw = raw.view(12, -1)
    rings = [Section(raw, index * ring_bytes, record) for index in range(config.drafter.num_layers)]
    plain = ropes_of(config, CPU).plain.at(torch.arange(POSITIONS), POSITIONS - 1)
    return GpuDrafter(
        config,
        weights,
        cast("Records", SimpleNamespace(rings=[*[None] * config.num_layers, *rings])),
        Turns(plain, plain),
        embedding=shared().embedding.bfloat16(),
        head=Checkpoint(tiny_v41(), config).dense("head.weight").bfloat16(),
        products=Products(is_invariant=False),
    )


def propose(*rows: Any) -> Proposal:
    numbers = [[row.token_id for row in rows], [row.position for row in rows], [row.window for row in rows]]
    newest, positions, slots = torch.tensor(numbers)
    return drafter().propose(newest, positions, slots, torch.tensor([row.window_from for row in rows]))


def forced(step: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits and confidences of a step when the golden tokens are drafted."""
    proposal = propose(step_row(step))
    after = [
        drafter().after(proposal, place, torch.tensor([token]))
        for place, token in enumerate([step["golden"], *step["drafted"][:-1]])
    ]
    return torch.cat([logits for logits, _ in after]), torch.cat([sure for _, sure in after])


@pytest.mark.parametrize("name", ["t1_n17", pytest.param("t07_n48", marks=pytest.mark.slow)])
def test_every_step_of_a_golden_answer_is_drafted_alike(name: str) -> None:
    """Logits and confidences, over rejected drafts and a wrap, as near as production numerics are on a CPU."""
    distances = []
    for index, step in steps_of(rig(), "quant", name):
        logits, confidences = forced(step)

        wanted = golden(f"dspark.quant.{name}.step{index}.draft_logits")
        distances.append(float((wanted - logits).norm() / wanted.norm()))
        assert (golden(f"dspark.quant.{name}.step{index}.conf") - confidences).abs().max() <= 0.05
    assert max(distances) <= 0.08, distances


def test_greedy_drafts_are_the_golden_ones_where_they_are_no_tie() -> None:
    """Place after place, each after the token before it."""
    answer = golden_json("dspark/dspark.exact.t0_n17")
    rig().remember(1, golden(f"features.exact.{answer['prompt']}"), 0)
    told_apart = 0
    for index, step in enumerate(answer["steps"]):
        rig().remember(1, golden(f"dspark.exact.t0_n17.step{index}.features"), step["start"])
        logits, _ = forced(step)
        best = logits.topk(2).values
        sure = (best[:, 0] - best[:, 1] > 0.3).tolist()
        told_apart += sum(sure)
        chosen = zip(step["drafted"], logits.argmax(dim=1).tolist(), sure, strict=True)
        assert all(expected == got for expected, got, is_sure in chosen if is_sure)
    assert told_apart > len(answer["steps"])


def test_sequences_of_all_lengths_are_drafted_together() -> None:
    """Windows that are not full, full, and wrapped, one that begins late, and padding, which disturbs nobody."""
    rows = mates(rig())
    together = propose(*rows)
    expected = rig().drafter.propose(rows)
    distance = (expected.base - together.base).flatten(1).norm(dim=1) / expected.base.flatten(1).norm(dim=1)
    assert float(distance.max()) < 0.08
    newest, positions, slots = (torch.tensor([getattr(row, name) for row in rows[:2]]) for name in
                                ("token_id", "position", "window"))  # fmt: skip
    padded = drafter().propose(
        torch.cat([newest, torch.zeros(1).long()]),
        torch.cat([positions, torch.zeros(1).long()]),
        torch.cat([slots, torch.tensor([-1])]),
        torch.zeros(3).long(),
    )
    assert padded.base.isfinite().all()
    near = (padded.base[:2] - together.base[:2]).norm() / together.base[:2].norm()
    assert float(near) < 0.02


def test_its_bytes_are_planned() -> None:
    """Within two percent, aside of what only a tiny model notices: padded experts, zeros that dress the final norm."""
    config = shared().config
    without, with_drafter = (
        weight_bytes(config, "fp4", experts_here=config.moe.num_experts, has_drafter=flag) for flag in (False, True)
    )
    made = DrafterLoader(config, Checkpoint(tiny_v41(), config), CPU, experts="fp4").load_drafter()
    padding = sum(
        (each.data.nbytes + each.scale.nbytes) // 2
        for layer in made.layers
        for each in (layer.moe.up, layer.moe.down)
        if isinstance(each, Weights)
    )
    taken = sum(each.nbytes for each in tensors_of(made)) - padding - made.last.parts.nbytes
    assert abs(with_drafter - without - taken) < 0.02 * taken


@pytest.mark.long
def test_the_kernels_draft_as_their_twins_do() -> None:
    """Interpreted, one sequence in a window that has wrapped."""
    row = mates(rig())[7]
    expected = propose(row)
    with interpreted():
        got = propose(row)
    assert float((expected.base - got.base).norm() / expected.base.norm()) < 0.1
