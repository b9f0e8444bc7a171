"""How do measured figures become the tables and pictures of docs/performance.md?

    python -m bench.gpu_report          # reads bench/results/gpu_*.json; needs no GPU

Rewrites the part of docs/performance.md between its two markers, docs/roofline_dense.svg and docs/roofline_v41.svg.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.roofline_plot import draw_dense, draw_v41

ROOT = Path(__file__).resolve().parent.parent
_BEGIN, _END = "<!-- table: dense -->", "<!-- end: dense -->"
# (figure, batch, context, sampling) -> (vLLM 0.25.1 on this machine type, what was to be reached), tokens/s.
REFERENCES: dict[tuple[str, int, int], tuple[int, int]] = {
    ("llama-8b decode", 1, 1024): (204, 225),
    ("llama-8b decode", 64, 1024): (8_502, 9_300),
    ("llama-8b decode", 256, 1024): (14_434, 16_000),
    ("llama-8b decode", 8, 8192): (1_268, 1_400),
    ("llama-8b prefill", 64, 1024): (43_800, 43_800),
    ("smollm2-135m decode", 1, 512): (570, 850),
    ("smollm2-135m decode", 64, 512): (22_138, 33_000),
    ("smollm2-135m decode", 256, 512): (52_321, 70_000),
    ("smollm2-135m prefill", 64, 1024): (696_811, 700_000),
}
_COLUMNS = "work, vLLM 0.25.1, to reach, fastest, invariant, floor, of floor, cost of invariance, waiting loop, idle"
_HEAD = "| " + _COLUMNS.replace(", ", " | ") + " |\n" + "|---" * 10 + "|"


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown, one row per figure."""
    return "\n".join([_HEAD, *map(_row, lines)])


def _row(line: dict[str, Any]) -> str:
    fastest, invariant = line["fastest"], line["invariant"]
    is_greedy = line["sampling"] == "greedy"
    key = (line["figure"], line["batch"], line["context"])
    vllm, wanted = (f"{each:,}" for each in REFERENCES[key]) if is_greedy else ("", "")
    name = f"{line['figure']}, {line['batch']} x {line['context']:,}" + ("" if is_greedy else f", {line['sampling']}")
    rates = [each["tokens_per_second"] for each in (fastest, invariant)]
    floor = line["floor_tokens_per_second"]
    waiting = f"{line['batch'] / fastest['waiting_step_seconds']:,.0f}" if "waiting_step_seconds" in fastest else ""
    idle = f"{100 * fastest['idle_share']:.1f} %" if "idle_share" in fastest else ""
    cells = [
        name,
        vllm,
        wanted,
        f"**{rates[0]:,.0f}**",
        f"{rates[1]:,.0f}",
        f"{floor:,.0f}",
        f"{100 * rates[0] / floor:.0f} %",
        f"{rates[0] / rates[1]:.2f}x",
        waiting,
        idle,
    ]
    return "| " + " | ".join(cells) + " |"


def _ceilings(document: dict[str, Any]) -> str:
    measured = document["yardsticks"]
    copy, gemm = measured["copy_bytes_per_second"] / 1e12, measured["gemm_flops"] / 1e12
    launch = measured["graph_kernel_seconds"] * 1e6
    return (
        f"`{document['command']}`: {document['machine']}; copy {copy:.2f} TB/s, bf16 GEMM {gemm:.0f} TFLOP/s,"
        f" a kernel in a graph {launch:.2f} us.  "
    )


def main() -> int:
    documents = [json.loads(path.read_text()) for path in sorted((ROOT / "bench" / "results").glob("gpu_dense_*.json"))]
    lines = [line for document in documents for line in document["figures"]]
    page = ROOT / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    ceilings = "\n".join(map(_ceilings, documents))
    page.write_text(f"{before}{_BEGIN}\n{ceilings}\n\n{table(lines)}\n{_END}{after}", encoding="utf-8")
    draw_dense(documents, ROOT / "docs" / "roofline_dense.svg")
    v41 = json.loads((ROOT / "bench" / "results" / "gpu_v41_h200.json").read_text())
    draw_v41(v41, ROOT / "docs" / "roofline_v41.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
