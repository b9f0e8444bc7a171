"""Where do tests find the golden vectors? In the repository, else in the full folder beside it, else nowhere: skip.

The repository's own selection is made by `python -m tools.golden_subset`; the manifest's "notes" say what each vector
may be compared with, and how closely.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

SUBSET = Path(__file__).resolve().parent / "golden"
FULL = Path(__file__).resolve().parents[3] / "shared" / "golden"


def golden(name: str) -> Tensor:
    """One vector, in the dtype it is stored in."""
    for folder in (SUBSET, FULL):
        if name in _names(folder):
            with safe_open(folder / "golden.safetensors", framework="pt") as stored:
                tensor: Tensor = stored.get_tensor(name)
                return tensor
    pytest.skip(f"golden vector {name} is not in the repository, and {FULL} lacks it or is not there")


def golden_names(prefix: str) -> tuple[str, ...]:
    """Names of all vectors to be had that start with `prefix`, sorted; for parametrised tests."""
    return tuple(sorted(name for name in _names(SUBSET) | _names(FULL) if name.startswith(prefix)))


def golden_json(key: str) -> Any:
    """A value of the manifest's "data", by its key: "greedy/greedy.kvq.n5", "replay/hit_table_real"."""
    for folder in (SUBSET, FULL):
        data = _manifest(folder).get("data", {})
        if key in data:
            return data[key]
    pytest.skip(f"golden value {key} is not in the repository, and {FULL} lacks it or is not there")


def golden_file(name: str) -> Any:
    """A whole file beside the manifest: "sampler.json", "block_keys.json"."""
    for folder in (SUBSET, FULL):
        if (folder / name).is_file():
            return json.loads((folder / name).read_text(encoding="utf-8"))
    pytest.skip(f"golden file {name} is neither in the repository nor in {FULL}")


def tiny_v41() -> Path:
    """The folder of the tiny checkpoint all vectors were made with. Do not write to it: copy it."""
    for folder in (SUBSET, FULL):
        if (folder / "tiny-v41" / "model.safetensors").is_file():
            return folder / "tiny-v41"
    pytest.skip(f"the tiny checkpoint is neither in the repository nor in {FULL}")


@lru_cache(maxsize=4)
def _names(folder: Path) -> frozenset[str]:
    if not (folder / "golden.safetensors").is_file():
        return frozenset()
    with safe_open(folder / "golden.safetensors", framework="pt") as stored:
        return frozenset(stored.keys())


@lru_cache(maxsize=4)
def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / "golden.json"
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return manifest
