"""V4.1's routed experts lie on a GPU as they would if each were brought there alone, however many are at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.models.gpu.v41 import expert_weights
from kernels.models.gpu.v41.expert_weights import ExpertFormat, ExpertLoader, Experts, Placement, Tensors
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.ops.gpu_fp8 import RowScaled
from kernels.ops.gpu_grouped import DEPTH, Weights, bf16_weights, fp4_weights
from kernels.ops.gpu_grouped_unpack import Packed, powers_of, unpack
from kernels.ops.quant import GROUP
from kernels.tests.golden_files import tiny_v41

CPU = torch.device("cpu")
PREFIX = "layers.1.ffn."
PLACEMENTS = {"all": None, "some": Placement((5, 0, 11, 3, 7))}


class Drawn:
    """Random experts of other sizes than the golden checkpoint's."""

    def __init__(self, config: V41Config) -> None:
        self._hidden, self._width = config.hidden_size, config.moe.width
        self.asked: list[str] = []

    def dense(self, name: str) -> Tensor:
        raise KeyError(name)

    def table(self, layer: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        raise KeyError(layer)

    def stored(self, name: str) -> Tensor:
        self.asked.append(name)
        out, size = (self._hidden, self._width) if ".w2." in name else (self._width, self._hidden)
        noise = torch.Generator().manual_seed(sum(map(ord, name)) * 7 + len(self.asked))
        if name.endswith(".scale"):
            made = torch.randint(110, 122, (out, size // GROUP), generator=noise, dtype=torch.uint8)
            return made.view(torch.float8_e8m0fnu)
        return torch.randint(0, 256, (out, size // 2), generator=noise, dtype=torch.uint8).view(torch.int8)


class Kept:
    """The same answer each time."""

    def __init__(self, inner: Tensors) -> None:
        self._inner, self._known = inner, dict[str, Tensor]()
        self.dense, self.table = inner.dense, inner.table

    def stored(self, name: str) -> Tensor:
        if name not in self._known:
            self._known[name] = self._inner.stored(name)
        return self._known[name]


def alone(config: V41Config, tensors: Tensors, expert: int, experts: ExpertFormat) -> list[Weights | RowScaled]:
    """One expert's two matrices: gate on top of the projection with zeros between and behind, and down."""
    padding = -config.moe.width % DEPTH

    def stored(part: str, kind: str) -> Tensor:
        return tensors.stored(f"{PREFIX}experts.{expert}.{part}.{kind}").view(torch.uint8)

    made: list[Weights | RowScaled] = []
    for parts in (("w1", "w3"), ("w2",)):
        data, scale = ([stored(part, kind) for part in parts] for kind in ("weight", "scale"))
        if len(parts) > 1:
            data, scale = ([torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in each] for each in (data, scale))
        else:
            data = [torch.nn.functional.pad(data[0], (0, padding // 2))]
            scale = [torch.cat([scale[0], scale[0][:, :1].expand(-1, padding // GROUP)], 1)]
        packed = fp4_weights(torch.cat(data)[None], torch.cat(scale)[None])
        made.append({"fp4": lambda each: each, "bf16": bf16_weights, "fp8": _e4m3}[experts](packed))
    return made


def _e4m3(packed: Weights) -> RowScaled:
    return unpack(packed, powers_of(packed))


def loaded(
    config: V41Config, tensors: Tensors, experts: ExpertFormat, placement: Placement, *, unpacks: bool = False
) -> tuple[Experts, Experts]:
    loader = ExpertLoader(config, tensors, CPU, experts=experts, placement=placement, unpacks=unpacks)
    return loader.load(PREFIX)


def sources(name: str) -> tuple[V41Config, Tensors]:
    """The golden checkpoint, whose width is half of the kernel's depth, or another without and with padding."""
    config = read_v41_config(tiny_v41())
    if name == "golden":
        return config, Checkpoint(tiny_v41(), config)
    width = {"whole": 2 * DEPTH, "padded": DEPTH + GROUP}[name]
    config = replace(config, hidden_size=3 * DEPTH, moe=replace(config.moe, width=width))
    return config, Kept(Drawn(config))


@pytest.mark.parametrize("placed", PLACEMENTS)
@pytest.mark.parametrize("experts", ["fp4", "bf16", "fp8"])
@pytest.mark.parametrize("source", ["golden", "whole", "padded"])
def test_experts_lie_as_each_would_alone(
    source: str, experts: ExpertFormat, placed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, in every format; some at a time with a rest, all at once, and one at a time."""
    config, tensors = sources(source)
    placement = PLACEMENTS[placed] or Placement(tuple(range(config.moe.num_experts)))
    expected = [alone(config, tensors, expert, experts) for expert in placement.here]
    bytes_of_one = config.hidden_size * -(-config.moe.width // DEPTH) * DEPTH
    for at_once in (3 * bytes_of_one, 1 << 40, 1):
        monkeypatch.setattr(expert_weights, "_AT_ONCE_BYTES", at_once)
        made = loaded(config, tensors, experts, placement)
        for matrix, each in enumerate(made):
            assert isinstance(each, Weights | RowScaled)
            assert len(placement.here) == each.experts
            for place, one in enumerate(expected):
                assert torch.equal(one[matrix].data.view(torch.uint8)[0], each.data.view(torch.uint8)[place])
                assert torch.equal(one[matrix].scale[:1], each.scale[place : place + 1])


def test_a_few_are_brought_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than what memory is kept for: the bytes of those that are in hand stay under the bound."""
    config, _ = sources("whole")
    drawn, held = Drawn(config), []

    def noted(data: Tensor, scale: Tensor) -> Weights:
        held.append(data.nbytes)
        return fp4_weights(data, scale)

    monkeypatch.setattr(expert_weights, "fp4_weights", noted)
    monkeypatch.setattr(expert_weights, "_AT_ONCE_BYTES", 1 << 19)
    loaded(config, drawn, "fp4", Placement(tuple(range(16))))

    half = config.hidden_size * config.moe.width // 2
    assert [2 * half * 5] * 3 + [2 * half] + [half * 10, half * 6] == held
    assert 6 * 16 == len(drawn.asked) == len(set(drawn.asked))


def test_packed_experts_keep_their_bytes() -> None:
    """Those that become e4m3 later are the same fp4 bytes, beside their rows' powers."""
    config, tensors = sources("whole")
    placement = Placement((3, 1))
    plain, packed = loaded(config, tensors, "fp4", placement), loaded(config, tensors, "fp4", placement, unpacks=True)
    for a, b in zip(plain, packed, strict=True):
        assert isinstance(a, Weights)
        assert isinstance(b, Packed)
        assert torch.equal(a.data, b.weights.data)
        assert torch.equal(a.scale.amax(2), b.powers.largest)
