"""How near do measured steps and kernels come to what memory and arithmetic allow? Pictures of published results.

Left, a roofline: operations per byte across, operations per second up, and the roof that the run's own yardsticks make.
Right, the same as shares of the floor, or where the time above the floor is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu_shapes import GPU_SHAPES
from bench.roofline import FP8_OVER_BF16, decode_work, prefill_work
from kernels.models.config import parse_config

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 14
_LEAST_FLOPS = 5e11
"""Per second: what does less is not on a roofline; its floor is its bytes alone."""

Dot = tuple[str, float, float]
"""Name, operations per byte, operations per second."""


def dense_dots(document: Mapping[str, Any], mode: str) -> list[Dot]:
    """One for each greedy figure of a model: whole steps, by the counts of bench/roofline.py."""
    dots = []
    for line in document["figures"]:
        if line["sampling"] != "greedy":
            continue
        model, kind = line["figure"].rsplit(" ", 1)
        make = decode_work if kind == "decode" else prefill_work
        work = make(parse_config(GPU_SHAPES[model], {}), line["batch"], line["context"])
        seconds = line[mode].get("step_seconds") or line[mode]["seconds"]
        dots.append(
            (f"{kind} {line['batch']} x {line['context']:,}", work.flops / work.num_bytes, work.flops / seconds)
        )
    return dots


def v41_dots(rows: Sequence[Mapping[str, Any]]) -> list[Dot]:
    """One for each kernel that multiplies; those that take little of a step have no name."""
    most = max(row["step_ms"] for row in rows if row["figure"] == "kernel")
    return [
        (row["kernel"] if row["step_ms"] > most / 16 else "", row["tflops"] * 1e3 / row["gbps"], row["tflops"] * 1e12)
        for row in rows
        if row["figure"] == "kernel" and row["tflops"] * 1e12 >= _LEAST_FLOPS
    ]


def draw_dense(documents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Steps of every model under the roof, and their shares of the floor."""
    figure, (left, right) = _figure()
    _roof(left, documents[0]["yardsticks"], fp8=False)
    bars: list[tuple[str, float]] = []
    for color, document in zip(("tab:blue", "tab:orange"), documents, strict=False):
        model = str(document["figures"][0]["figure"]).split(" ", maxsplit=1)[0]
        for mode, marker in (("fastest", "o"), ("invariant", "x")):
            _dots(left, dense_dots(document, mode), color, marker, f"{model}, {mode}", named=mode == "fastest")
        for line in document["figures"]:
            share = line["fastest"]["tokens_per_second"] / line["floor_tokens_per_second"]
            how = "" if line["sampling"] == "greedy" else ", top-p"
            bars.append((f"{line['figure']}, {line['batch']} x {line['context']:,}{how}", 100 * share))
    left.legend(fontsize=7, loc="lower right")
    names, shares = zip(*reversed(bars), strict=True)
    drawn = right.barh(names, shares, color="tab:blue", alpha=0.7)
    right.bar_label(drawn, fmt="%.0f %%", fontsize=7, padding=2)
    right.axvline(100, color="black", linewidth=0.8)
    right.set_xlabel("of the floor (fastest), %")
    _save(figure, path)


def draw_v41(document: Mapping[str, Any], path: Path) -> None:
    """Kernels under the roof, decode's and prefill's; and where a decode step's time is, above and below its floors."""
    figure, (left, right) = _figure()
    _roof(left, document["decode"]["yardsticks"], fp8=True, lowest=5.0)
    for color, step in (("tab:blue", "decode"), ("tab:orange", "prefill")):
        _dots(left, v41_dots(document[step]["rows"]), color, "o", step, named=step == "decode")
    left.legend(fontsize=7, loc="lower right")
    rows = [row for row in document["decode"]["rows"] if row["figure"] == "kernel"]
    rows.sort(key=lambda row: -float(row["step_ms"]))
    shown = rows[:_MOST_BARS][::-1]
    names = [f"{row['kernel']} x {row['times']}" for row in shown]
    floors = [min(row["floor_us"] * row["times"] / 1e3, row["step_ms"]) for row in shown]
    right.barh(names, [row["step_ms"] for row in shown], color="tab:blue", alpha=0.35, label="measured")
    right.barh(names, floors, color="tab:blue", label="floor")
    right.set_xlabel("ms of a decode step")
    right.legend(fontsize=7, loc="lower right")
    _save(figure, path)


def _figure() -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    right.tick_params(labelsize=7)
    right.grid(visible=True, axis="x", alpha=0.3)
    return figure, (left, right)


def _roof(axes: Axes, ceilings: Mapping[str, float], *, fp8: bool, lowest: float = 0.5) -> None:
    copy, gemm = ceilings["copy_bytes_per_second"], ceilings["gemm_flops"]
    for peak, name, style in ((gemm, "bf16", "-"), (gemm * FP8_OVER_BF16, "fp8", "--"))[: 1 + fp8]:
        edge = peak / copy
        axes.plot(
            [lowest, edge, 2e4], [copy * lowest / 1e12, peak / 1e12, peak / 1e12], style, color="black", linewidth=1
        )
        axes.annotate(f"{name} GEMM, {peak / 1e12:.0f} TFLOP/s", (edge, peak / 1e12 * 1.08), fontsize=7)
    axes.annotate(f"copy, {copy / 1e12:.2f} TB/s", (2 * lowest, copy * 3.5 * lowest / 1e12), fontsize=7, ha="center")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(visible=True, alpha=0.3)


def _dots(axes: Axes, dots: Sequence[Dot], color: str, marker: str, label: str, *, named: bool) -> None:
    across, up = [dot[1] for dot in dots], [dot[2] / 1e12 for dot in dots]
    axes.scatter(across, up, s=22, color=color, marker=marker, label=label, zorder=3)
    for name, x, y in dots if named else ():
        axes.annotate(name, (x, y / 1e12), fontsize=5.5, xytext=(4, -7), textcoords="offset points")


def _save(figure: Figure, path: Path) -> None:
    # The same bytes from the same figures: ids of clips are random otherwise.
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "fathom", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
