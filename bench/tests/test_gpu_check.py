"""The sampler's check finds the host's choices, and says where they differ."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from bench import gpu_check
from bench.gpu_check import check_sampler

FEW = (gpu_check.WAYS[2], gpu_check.WAYS[4], gpu_check.WAYS[8], gpu_check.WAYS[9])


@pytest.mark.slow
@pytest.mark.parametrize("spoils", [False, True])
def test_the_samplers_check_tells_right_from_wrong(
    spoils: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the interpreter: top-k, top-p, all of them and greedy; then with rows that were told another top-k."""
    monkeypatch.setattr(gpu_check, "WAYS", FEW)
    monkeypatch.setattr(gpu_check, "_REPEATS", 2)
    if spoils:
        told = gpu_check.asked_of
        monkeypatch.setattr(gpu_check, "asked_of", lambda *args: told(*args).roll(1, dims=1))
    torch.manual_seed(1)

    assert check_sampler("cpu", (321,)) is not spoils
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["plain", "ties", "peaks", "masked"] == [line["logits"] for line in lines]
    assert (any if spoils else all)(line["ok"] is not spoils for line in lines)
