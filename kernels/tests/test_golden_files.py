"""The golden vectors in the repository are few enough to clone, and unchanged."""

import json

import pytest
import torch
from safetensors import safe_open

from kernels.tests import golden_files
from kernels.tests.golden_files import FULL, SUBSET, golden, golden_file, golden_json, tiny_v41
from tools.golden_subset import CHECKPOINT, LIMIT_BYTES, VECTORS, select


def test_the_selection_is_small_and_described() -> None:
    """Below 12 MB with the checkpoint; the manifest lists exactly what is there."""
    manifest = json.loads((SUBSET / "golden.json").read_text(encoding="utf-8"))
    with safe_open(SUBSET / "golden.safetensors", framework="pt") as stored:
        names = set(stored.keys())

    assert LIMIT_BYTES >= sum(file.stat().st_size for file in SUBSET.rglob("*") if file.is_file())
    assert names == set(manifest["tensors"])
    assert SUBSET / "tiny-v41" == tiny_v41()
    assert {"exact", "kvq", "quant"} == set(manifest["notes"]["modes"])


def test_vectors_are_the_full_folder_s() -> None:
    """Bit for bit, wherever the full folder is at hand."""
    if not FULL.is_dir():
        pytest.skip(f"{FULL} is not there")
    with (
        safe_open(SUBSET / "golden.safetensors", framework="pt") as ours,
        safe_open(FULL / "golden.safetensors", framework="pt") as theirs,
    ):
        changed = [name for name in ours.keys() if not torch.equal(ours.get_tensor(name), theirs.get_tensor(name))]  # noqa: SIM118 - not a dict

    assert [] == changed
    for name in CHECKPOINT:
        assert (FULL / "tiny-v41" / name).read_bytes() == (SUBSET / "tiny-v41" / name).read_bytes()


def test_selecting_again_gives_the_same_bytes(tmp_path) -> None:
    """So that a larger selection shows in a diff as what was added."""
    if not FULL.is_dir():
        pytest.skip(f"{FULL} is not there")
    select(FULL, tmp_path)

    for name in ("golden.safetensors", "golden.json", "sampler.json", "block_keys.json"):
        assert (SUBSET / name).read_bytes() == (tmp_path / name).read_bytes(), (
            f"{name} is not what {VECTORS[0]}... select"
        )


def test_what_is_nowhere_is_skipped_with_a_reason(tmp_path, monkeypatch) -> None:
    """And what is only in the full folder is found there."""
    assert 24 == len(golden("greedy.kvq.n5.tokens"))
    assert golden_json("greedy/greedy.kvq.n5")
    assert golden_file("sampler.json")
    for missing in (lambda: golden("none"), lambda: golden_json("none"), lambda: golden_file("none.json")):
        with pytest.raises(pytest.skip.Exception, match="none"):
            missing()
    monkeypatch.setattr(golden_files, "SUBSET", tmp_path)
    monkeypatch.setattr(golden_files, "FULL", tmp_path)
    with pytest.raises(pytest.skip.Exception, match="tiny checkpoint"):
        tiny_v41()
