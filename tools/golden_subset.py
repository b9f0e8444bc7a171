"""Which golden vectors live in the repository, and how is that selection made from the full folder?

    python -m tools.golden_subset FULL_FOLDER

copies the tiny checkpoint and the vectors the tests use into kernels/tests/golden. Values are copied unchanged; the
same input gives the same bytes. Tests that want more look for the full folder and skip where it is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

TARGET = Path(__file__).resolve().parent.parent / "kernels" / "tests" / "golden"
LIMIT_BYTES = 12_000_000
"""Of everything in TARGET: a clone should stay small, and the tiny checkpoint alone is 8.5 MB."""

CHECKPOINT = ("config.json", "config_window128.json", "generation_config.json", "model.safetensors",
              "tokenizer.json", "tokenizer_config.json")  # fmt: skip
"""Not the index: the one file is its own."""

VECTORS = (
    "codec.*", "engram.*", "seq.*", "bytes.*", "state.*", "eplb.*", "vision.*", "verify.*",
    "logits.exact.n1", "logits.exact.n5", "logits.exact.n15", "logits.exact.n17", "logits.exact.n48",
    "logits.kvq.*", "n200.kvq.*", "features.exact.n17", "features.kvq.n17",
    "greedy.exact.*", "greedy.kvq.*", "greedy.quant.*.tokens", "greedy.quant.*.gap",
    "replay.*.ids", "replay.exact.*", "hit.exact.*",
    "dspark.exact.n17.*", "dspark.exact.t0_n17.*", "dspark.exact.t1_n48.*",
    # One encoder layer with every part, engram included, and one source per kind of selection.
    "n48.exact.layers.4.*", "n48.quant.layers.2.*",
    "n48.quant.layers.6.stream_in", "n48.quant.layers.6.pre_in", "n48.quant.layers.6.attn_*",
    "n48.quant.layers.6.compressed_*", "n48.quant.layers.6.index_*", "n48.quant.layers.6.candidate_*",
    "n48.exact.layers.*.router.*", "n48.exact.layers.*.index_*", "n48.exact.layers.*.candidate_*",
    "n48.exact.layers.*.pre_*", "n48.exact.layers.*.engram.*", "n48.quant.layers.1.engram.*",
    "n48.exact.layers.6.attn_out", "n48.exact.layers.11.attn_out", "n48.exact.layers.11.ffn_out",
    "n48.exact.layers.0.ffn_*", "n48.exact.pre_final", "n48.exact.final_hidden",
)  # fmt: skip


def select(full: Path, target: Path) -> int:
    """Write the selection; return its size in bytes. ValueError when a pattern names nothing or the limit is passed."""
    manifest: dict[str, Any] = json.loads((full / "golden.json").read_text(encoding="utf-8"))
    with safe_open(full / "golden.safetensors", framework="pt") as stored:
        names = sorted(stored.keys())
        empty = [pattern for pattern in VECTORS if not any(fnmatchcase(name, pattern) for name in names)]
        if empty:
            raise ValueError(f"no vector is named {', '.join(empty)}")
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in VECTORS)]
        target.mkdir(parents=True, exist_ok=True)
        save_file({name: stored.get_tensor(name) for name in chosen}, target / "golden.safetensors")
    (target / "golden.safetensors").chmod(0o644)
    manifest["tensors"] = {name: manifest["tensors"][name] for name in chosen}
    text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":"))
    (target / "golden.json").write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")
    for name in ("sampler.json", "block_keys.json"):
        shutil.copyfile(full / name, target / name)
    (target / "tiny-v41").mkdir(exist_ok=True)
    for name in CHECKPOINT:
        shutil.copyfile(full / "tiny-v41" / name, target / "tiny-v41" / name)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if size > LIMIT_BYTES:
        raise ValueError(f"the selection has {size:,} bytes; at most {LIMIT_BYTES:,} are wanted")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy the golden vectors that live in the repository.")
    parser.add_argument("full", type=Path, help="folder with golden.safetensors, golden.json and tiny-v41")
    arguments = parser.parse_args()
    print(f"{select(arguments.full, TARGET):,} bytes in {TARGET}")


if __name__ == "__main__":
    main()
