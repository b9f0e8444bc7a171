"""Where is a V4.1 for tests that hold it against itself? Every kind of layer is in it, in half the golden one's depth."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from kernels.models.v41.tiny import write_tiny_model
from kernels.tests.golden_files import tiny_v41

NUM_LAYERS = 6
_TEXT: dict[str, Any] = {
    # Encoder: the window alone, n-gram memory, entries of two tokens. Decoder: the source of candidates, a layer that
    # reads another's selection, one that selects among the candidates.
    "num_hidden_layers": NUM_LAYERS, "compress_ratios": [0, 0, 2, 1, 1, 1, 0, 0], "kv_source_layer_ids": [2, 3],
    "index_source_layer_ids": [2, 3, 5], "candidate_source_layer_id": 3, "engram_layer_ids": [1],
    "n_routed_experts": 8, "num_nextn_predict_layers": 2, "dspark_target_layer_ids": [4, 5],
}  # fmt: skip


@cache
def shallow_v41() -> Path:
    """Its folder, written once in a process and removed with it. Do not write to it: copy it."""
    folder = Path(_room().name) / "shallow-v41"
    tokenizer = {"tokenizer.json": (tiny_v41() / "tokenizer.json").read_text(encoding="utf-8")}
    write_tiny_model(folder, seed=41, tokenizer=tokenizer, text=_TEXT)
    return folder


@cache
def _room() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fathom-shallow-")
