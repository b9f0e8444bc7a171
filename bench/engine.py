"""How fast is the engine alone, and what does batch invariance cost?

    python -m bench.engine --model DIR            # a Hugging Face folder
    python -m bench.engine --random smollm2-135m  # random weights of that shape: no download

One JSON line per figure: tokens/s of the engine (greedy; "sampled" is T=0.8 with top-p 0.95), of a plain torch loop
over the same weights that is not batch-invariant, measured in alternation, and their ratio. Needs torch, numpy and
safetensors only; takes less than three minutes for a model of 135M parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import torch

from bench.engine_models import SHAPES, write_random_model
from bench.engine_plain import PlainLoop
from bench.engine_transformers import TransformersLoop
from kernels.batch import Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.models.model import Dtype
from kernels.ops.row_tiles import NotInvariant

PREFILL_TOKENS = 512
CONTEXT_TOKENS = 256
POSITIONS = range(192, 320)  # where decode steps are taken, in turn: 256 on average
BATCHES = (1, 8, 32)
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
_SECONDS = 8.0  # per figure, shared by the sides measured
_BLOCKS = 3  # per sequence: the context and what a figure adds to it

Side = tuple[str, Callable[[], None]]


class EngineLoop:
    """The executor driven as an engine drives it, minus scheduling."""

    def __init__(self, model_dir: Path, dtype: Dtype, device: str, threads: int) -> None:
        self.executor = Executor.load(
            model_dir, dtype=dtype, num_blocks=1 + _BLOCKS * max(BATCHES) + 4, threads=threads, device=device
        )
        self.invariant = self._warm_up()
        self._ids = [(index * 7919 + 17) % self.executor.config.vocab_size for index in range(PREFILL_TOKENS)]
        self._sync = torch.cuda.synchronize if device.startswith("cuda") else None
        self._fill()

    def prefill(self) -> None:
        """One whole prompt and its first token."""
        table = range(1 + _BLOCKS * max(BATCHES), 5 + _BLOCKS * max(BATCHES))
        self._run(Batch((Row(0, self._ids, 0, table, GREEDY),)))

    def decode(self, batch: int, sampling: SamplingParams) -> Callable[[], None]:
        """A function that takes one step of `batch` sequences, each call one token further."""
        tokens = [self._ids[index] for index in range(batch)]
        positions = spread_positions()

        def step() -> None:
            nonlocal tokens
            position = next(positions)
            rows = tuple(
                Row(index, [token], position, self._table(index), sampling) for index, token in enumerate(tokens)
            )
            tokens = self._run(Batch(rows))

        return step

    def _run(self, batch: Batch) -> list[int]:
        sampled = self.executor.collect(self.executor.launch(batch))
        if self._sync:
            self._sync()
        return [each.token_id for each in sampled]

    def _warm_up(self) -> bool:
        """Whether the start-up proof holds. A device where it does not can be measured, not served from."""
        try:
            self.executor.warm_up()
        except NotInvariant as error:
            print(f"not batch-invariant here: {error}", file=sys.stderr)
            return False
        return True

    @staticmethod
    def _table(index: int) -> range:
        return range(1 + _BLOCKS * index, 1 + _BLOCKS * (index + 1))

    def _fill(self) -> None:
        """One sequence is prefilled, the others get copies of its blocks."""
        self._run(Batch((Row(0, self._ids[: POSITIONS.stop], 0, self._table(0)),)))
        for block in range(_BLOCKS):
            payload = self.executor.read_block(self._table(0)[block])
            for index in range(1, max(BATCHES)):
                self.executor.write_block(self._table(index)[block], payload)


def spread_positions() -> Iterator[int]:
    """Every position of POSITIONS, again and again, in an order whose first few already average the middle."""
    return cycle(POSITIONS[index * 37 % len(POSITIONS)] for index in range(len(POSITIONS)))


def measure(sides: Sequence[Side]) -> dict[str, float]:
    """Median seconds of each side's call, the sides taking turns so that a busy machine slows all alike."""
    for _, call in sides:
        call()
    seconds: dict[str, list[float]] = {name: [] for name, _ in sides}
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(seconds[sides[0][0]]) < 3:
        for name, call in sides:
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def report(figure: str, tokens: int, taken: dict[str, float], **facts: object) -> None:
    """Print tokens/s of every side, and the engine's share of each peer's."""
    rates = {name: round(tokens / seconds, 1) for name, seconds in taken.items()}
    engine = rates["engine"]
    ratios = {f"engine/{name}": round(engine / rate, 2) for name, rate in rates.items() if name != "engine"}
    print(json.dumps({"figure": figure, "unit": "tokens/s", **facts, **rates, **ratios}), flush=True)


def plain_dtype(device: str) -> torch.dtype:
    """bf16 where the device multiplies it natively; elsewhere plain torch is faster in fp32."""
    native = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - no public name
    return torch.bfloat16 if native else torch.float32


def compare(model_dir: Path, device: str, threads: int, *, with_transformers: bool) -> None:
    """Every figure of one model."""
    dtype = plain_dtype(device)
    torch.set_num_threads(threads)
    plain = PlainLoop(model_dir, dtype, device)
    peer = TransformersLoop(model_dir, dtype, device) if with_transformers else None
    engine = EngineLoop(model_dir, "bf16", device, threads)
    facts = {
        "recipe": engine.executor.recipe,
        "row_tiles": engine.executor.row_tiles,
        "batch_invariant": engine.invariant,
        "plain_dtype": str(dtype),
    }
    print(json.dumps(facts), flush=True)
    ids = torch.arange(PREFILL_TOKENS, device=device)[None] % plain.config.vocab_size
    cache = plain.new_cache(max(BATCHES), PREFILL_TOKENS)

    sides: list[Side] = [
        ("engine", engine.prefill),
        ("plain", _synced(lambda: plain.step(ids, 0, cache[:, :, :1]), device)),
    ]
    if peer:
        sides.append(("transformers", _synced(lambda: peer.prefill(ids), device)))
    report("prefill", PREFILL_TOKENS, measure(sides), dtype="bf16")

    def plain_decode(batch: int) -> Side:
        token, positions = ids[:, :batch].T.contiguous(), spread_positions()
        return "plain", _synced(lambda: plain.step(token, next(positions), cache[:, :, :batch]), device)

    for batch in BATCHES:
        sides = [
            ("engine", engine.decode(batch, GREEDY)),
            ("sampled", engine.decode(batch, SAMPLED)),
            plain_decode(batch),
        ]
        if peer:
            sides.append(("transformers", _synced(peer.decode(ids[:, :CONTEXT_TOKENS], batch), device)))
        report("decode", batch, measure(sides), dtype="bf16", batch=batch, context=CONTEXT_TOKENS)
    if device == "cpu":
        engine = EngineLoop(model_dir, "int8", device, threads)
        taken = measure([("engine", engine.decode(1, GREEDY)), plain_decode(1)])
        report("decode", 1, taken, dtype="int8", batch=1, context=CONTEXT_TOKENS)
        report("prefill", PREFILL_TOKENS, measure([("engine", engine.prefill)]), dtype="int8")


def _synced(call: Callable[[], object], device: str) -> Callable[[], None]:
    def run() -> None:
        call()
        if device != "cpu":
            torch.cuda.synchronize()

    return run


def _default_model() -> Path:
    from services.local.pull import pull  # machines with random weights only need not have its libraries

    return pull(Path(__file__).resolve().parent.parent / ".fathom" / "models")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="Hugging Face folder (default: what `fathom pull` fetched)")
    source.add_argument("--random", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (CPU)")
    parser.add_argument("--transformers", action="store_true", help="also measure transformers")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as scratch:
        model_dir = write_random_model(asked.random, Path(scratch)) if asked.random else asked.model or _default_model()
        compare(model_dir, asked.device, asked.threads, with_transformers=asked.transformers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
