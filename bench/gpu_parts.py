"""Which runs of the GPU's benches are there, most worth first, and how long may each take?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    words: tuple[str, ...]
    """After `python`; {out} is a folder of its own, {model} a small dense model's."""
    seconds: float
    """It is ended after so long."""
    why: str

    @property
    def wants_model(self) -> bool:
        return "{model}" in self.words

    def on(self, model: Path | None) -> Part:
        """With that model's folder, which wants_model wants."""
        return replace(self, words=tuple(str(model) if each == "{model}" else each for each in self.words))


def _bench(name: str, module: str, words: str, seconds: float, why: str) -> Part:
    return Part(name, ("-m", f"bench.{module}", *words.split()), seconds, why)


def _step(name: str, words: str, seconds: float, why: str) -> Part:
    return _bench(name, "gpu_v41_step", f"{words} --out {{out}}", seconds, why)


def _sanitize(tool: str, run: str, seconds: int) -> Part:
    name = f"sanitize-{tool}-{run.removeprefix('v41 ').replace(', ', '-').replace(' ', '-')}"
    limit = str(seconds - 10)  # of the run itself, so that it can still say what it saw
    words = ("-m", "bench.gpu_sanitize", "--only", run, "--tools", tool, "--seconds", limit, "--out", "{out}")
    return Part(name, words, seconds, f"{tool} over the kernels of {run!r}")


PARTS: tuple[Part, ...] = (
    _bench("compile", "gpu_compile", "", 120, "what V4.1's steps launch, on all cores"),
    _bench("check-v41", "gpu_v41", "check", 180, "every V4.1 kernel against its twin"),
    _step("prefill-fastest", "prefill --modes fastest --layers 6", 150, "a chunk through six layers"),
    _step("decode-fastest", "decode --modes fastest", 200, "a whole verification step"),
    _bench("rows-at-once", "gpu_v41_rows_at_once", "", 90, "kernels that move a whole row at once, beside floors"),
    _bench("dense-fp8", "gpu_v41_dense", "", 90, "dense fp8 products: the library's beside our own"),
    _bench("experts-packed", "gpu_v41_experts", "packed", 120, "fp4 in registers, its ways beside each other"),
    _bench("ways-decode", "gpu_v41_step_ways", "decode --out {out}", 330, "other ways of a part, in whole steps"),
    _bench("same-tokens", "gpu_same_tokens", "--out {out}", 150, "the tiny V4.1: same answers whichever way"),
    _step("prefill-most-layers", "prefill --modes fastest --layers 0", 200, "as many encoder layers as fit at once"),
    _bench("ways-prefill", "gpu_v41_step_ways", "prefill --out {out}", 280, "the same of a chunk"),
    _step("decode-invariant", "decode --modes invariant", 200, "the mode that is served, as a step"),
    _sanitize("memcheck", "v41 experts", 120),
    _sanitize("racecheck", "v41 experts", 300),
    _sanitize("memcheck", "v41 attention", 120),
    _sanitize("racecheck", "v41 attention", 200),
    _sanitize("memcheck", "v41 gated", 60),
    _sanitize("racecheck", "v41 gated", 150),
    _sanitize("memcheck", "v41 rows at once", 60),
    _sanitize("racecheck", "v41 rows at once", 90),
    _sanitize("racecheck", "v41 dense", 60),
    _sanitize("racecheck", "v41 streams", 60),
    _sanitize("racecheck", "v41 index", 90),
    _sanitize("memcheck", "v41 index", 60),
    _sanitize("memcheck", "v41 streams", 60),
    _sanitize("memcheck", "dense, one kernel", 90),
    _bench("check-dense", "gpu_check", "--out {out}", 90, "dense kernels; top-k and top-p beside the host's sampler"),
    _bench("full-device", "gpu_full", "--out {out}", 120, "memory planned to the last block, and every block filled"),
    Part(
        "services-dense",
        ("-m", "bench.gpu_same_tokens", "--model", "{model}", "--services", "1", "2", "--out", "{out}"),
        280,
        "greedy and seeded answers through one and two prefill and decode replicas beside one process",
    ),
    _bench("services-v41", "gpu_same_tokens", "--services 2 --out {out}", 280, "the same of the tiny V4.1"),
    _step("prefill-invariant", "prefill --modes invariant --layers 6", 200, "the mode that is served, as a chunk"),
    _bench("roofline-v41-decode", "roofline", "--model v41 --json", 120, "each kernel's share of its limit"),
    _bench("roofline-v41-prefill", "roofline", "--model v41 --prefill --json", 120, "the same"),
    _bench("roofline-dense-decode", "roofline", "--model llama-8b --json", 90, "the same of Llama-8B"),
    _bench("roofline-dense-prefill", "roofline", "--model llama-8b --batch 16 --prefill --json", 90, "the same"),
    _bench("one-kernel", "gpu_dense_step", "", 270, "a decode step of all layers in one kernel"),
    _bench("experts", "gpu_v41_experts", "decode prefill", 240, "ways of multiplying experts"),
    _bench("attention", "gpu_v41_attention", "", 180, "ways of attention and of index scores"),
    _bench("soak", "gpu_soak", "--steps 4000 --out {out}", 150, "arrivals, cancels and preemptions, run ahead"),
    _bench("dense", "gpu_dense", "--out {out}", 330, "dense models beside their floors"),
    _bench("ways", "gpu_ways", "", 120, "choices between two ways that give the same"),
)
