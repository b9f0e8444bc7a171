"""What a bench has said is in its file, whatever becomes of it afterwards."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing is compiled")

from triton import knobs
from triton.knobs import CompileTimes

from bench.gpu_lines import Lines


def test_the_document_is_whole_after_each_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its head, and every line so far; the same lines are printed."""
    path = tmp_path / "made" / "a.json"
    said = Lines(path, machine="none", command="c")
    for number in (1, 2):
        said.say("step", ms=number)
        document = json.loads(path.read_text())
        assert {"machine": "none", "command": "c"}.items() <= document.items()
        assert [{"figure": "step", "ms": each + 1} for each in range(number)] == document["figures"]
    assert document["figures"] == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["a.json"] == [each.name for each in path.parent.iterdir()]


def test_a_figure_that_failed_is_known() -> None:
    """By an exception's words or by a verdict."""
    for facts, failed in (
        ({"ms": 1}, False),
        ({"failed": "x"}, True),
        ({"passed": False}, True),
        ({"passed": True}, False),
    ):
        said = Lines()
        said.say("step", **facts)
        assert failed is said.failed


def test_a_stage_tells_what_was_compiled_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that fails; who listened before listens again."""
    said, times = (
        Lines(),
        CompileTimes(ir_initialization=1_000_000, lowering_stages=[("ttir", 500_000)], store_results=0),
    )

    def in_between() -> None:
        for is_found in (False, True, True):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=is_found)
        raise KeyError("what")

    before = knobs.compilation.listener
    with pytest.raises(KeyError), said.stage("captured", step="decode"):
        in_between()

    assert before is knobs.compilation.listener
    (line,) = said.figures
    expected = {"stage": "captured", "step": "decode", "compiled": 1, "compile_seconds": 1.5, "found_compiled": 2}
    assert expected.items() <= line.items()
    assert 0 <= line["seconds"] < 5
    assert line == json.loads(capsys.readouterr().out)
