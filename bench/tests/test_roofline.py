"""Bytes and operations counted from shapes are those that the measured runs were held against."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: V4.1's benchmark cannot be imported")

from bench import roofline_calls
from bench.gpu_shapes import GPU_SHAPES
from bench.gpu_v41_work import decode_shape, prefill_shape
from bench.roofline import NOMINAL, Kernel, Work, decode_work, lines, prefill_work, table
from bench.roofline_calls import Step, dense_calls, each_timed
from bench.roofline_v41 import v41_work
from kernels.models.config import parse_config

RESULTS = Path(__file__).parents[1] / "results"
LLAMA = parse_config(GPU_SHAPES["llama-8b"], {})


def measured(step: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """A published run's yardsticks and kernels."""
    run = json.loads((RESULTS / "gpu_v41_h200.json").read_text())[step]
    return run["yardsticks"], [row for row in run["rows"] if row["figure"] == "kernel"]


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_v41_kernels_have_the_published_floors(step: str) -> None:
    """All of them, in their number, to the last digit that was printed."""
    ceilings, rows = measured(step)
    work = v41_work(decode_shape() if step == "decode" else prefill_shape())
    floors = {each.name: round(each.floor_seconds(ceilings) / each.count * 1e6, 1) for each in work.kernels}

    assert {row["kernel"]: row["floor_us"] for row in rows} == pytest.approx(floors, abs=0.01)
    assert {row["kernel"]: row["times"] for row in rows} == {each.name: each.count for each in work.kernels}
    for row, each in zip(rows, work.kernels, strict=True):
        assert each.flops / each.count == pytest.approx(row["tflops"] * row["us"] * 1e6, rel=0.01, abs=0.1e12), row


@pytest.mark.parametrize(("model", "index"), [("llama-8b", 1), ("llama-8b", 4), ("smollm2-135m", 0)])
def test_dense_steps_have_the_published_floors(model: str, index: int) -> None:
    """Within the embedding's rows, which were not counted then."""
    document = json.loads((RESULTS / f"gpu_dense_{model}.json").read_text())
    figure = document["figures"][index]
    make = prefill_work if "prefill" in figure["figure"] else decode_work
    work = make(parse_config(GPU_SHAPES[model], {}), figure["batch"], figure["context"])

    assert figure["floor_seconds"] == pytest.approx(work.floor_seconds(document["yardsticks"]), rel=2e-3)


def test_a_window_bounds_what_attention_reads_and_computes() -> None:
    """Pairs of a prompt: a triangle as wide as the window, then a band."""
    whole, few = (decode_work(LLAMA, 8, 8192, window=window) for window in (0, 128))
    band = prefill_work(LLAMA, 1, 4, window=2)
    attention = {each.name: each for each in band.kernels}["attention"]

    assert whole.num_bytes - few.num_bytes == 8 * (8192 - 128) * 32 * 2 * 2 * 1024
    assert (31 + 1 / 4) * 4 * (1 + 2 + 2 + 2) * 4096 == attention.flops
    assert prefill_work(LLAMA, 2, 64).flops == prefill_work(LLAMA, 2, 64, window=64).flops


def test_what_is_printed_holds_times_against_limits() -> None:
    """Without times floors alone; the step's share only when each of its kernels was timed."""
    work = Work((Kernel("a", 4.26e9, count=2), Kernel("b", 1.0, 7.05e11, count=1), Kernel("none", 0.0)))
    plain, timed = list(lines("s", work, NOMINAL, {})), list(lines("s", work, NOMINAL, {"a": 1e-3, "b": 4e-3}))

    assert ["bytes", "operations", "bytes"] == [row["bound"] for row in plain[:-1]]
    assert "us" not in plain[-1]
    assert (0.5, 0.25) == (timed[0]["of_limit"], timed[1]["of_limit"])
    assert {"us": 6000.0, "of_limit": 0.333}.items() <= timed[-1].items()
    assert 5 == len(table(timed).splitlines())


@pytest.mark.parametrize("prefill", [False, True])
def test_every_counted_kernel_of_a_dense_step_can_be_timed(prefill: bool) -> None:
    """By the same names, with tensors that fit together: run once here, by the kernels' twins."""
    raw = GPU_SHAPES["smollm2-135m"] | {"num_hidden_layers": 1, "vocab_size": 300, "intermediate_size": 64}
    config = parse_config(raw, {})
    work = (prefill_work if prefill else decode_work)(config, 2, 40, window=16)
    calls = dense_calls(Step(config, 2, 40, 16, prefill, "cpu"))

    assert {each.name for each in work.kernels if each.num_bytes} == set(calls)
    for each in calls.values():
        assert all(call() is not None for call in each)


def test_what_comes_from_the_host_waits_for_the_host() -> None:
    """Where its rate is known."""
    memory = {each.name: each for each in v41_work(decode_shape()).kernels}["engram rows, host"]

    assert "host" == memory.waits_for(NOMINAL)
    assert 256 * 24 * 264 / 5.5e10 == pytest.approx(memory.floor_seconds(NOMINAL) / memory.count)


def test_a_kernel_that_cannot_be_timed_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said and left out; the others come as they are timed."""

    def in_turn(calls: list[Callable[[], object]]) -> float:
        return float(sum(bool(call()) for call in calls)) / len(calls)

    def broken() -> object:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(roofline_calls, "graph_seconds", in_turn)
    took = dict(each_timed({"a": [lambda: 1], "b": [broken], "c": [lambda: 1, lambda: 0]}, 2.0))

    assert {"a": 2.0, "c": 1.0} == took
    assert {"kernel": "b", "failed": "RuntimeError: no such kernel"} == json.loads(capsys.readouterr().out)
