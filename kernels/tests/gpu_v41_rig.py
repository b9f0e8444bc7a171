"""A shallow V4.1 as a GPU runs it, through its kernels' twins on the CPU, beside the CPU's own model in the same state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from math import isnan
from typing import cast

import torch
from torch import Tensor

from kernels.batch import Batch, Row
from kernels.models.gpu.v41.layer import Layer
from kernels.models.gpu.v41.model import GpuV41
from kernels.models.gpu.v41.opened import OpenedGpuV41
from kernels.models.gpu.v41.step import State, Step
from kernels.ops.gpu_launch import interpreted, runs_kernels
from kernels.ops.hyper import Coefficients
from kernels.tests.shallow_v41 import shallow_v41
from kernels.tests.v41_rig import BLOCKS_EACH, WINDOWS, Watcher, blocks_of, model_of, run, start

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = "shallow quant"
"""The CPU's own model."""
SAME, SAME_BYTES = 0.08, 0.97
"""Of values and of records. Sums made in another order round the other way now and then, and a tie chooses another entry;
a step is therefore compared layer by layer, each on the CPU's own streams, so that no flip is handed on."""


@cache
def gpu_model() -> GpuV41:
    """One for a test process."""
    with torch.inference_mode():
        return opened().build(num_blocks=1 + WINDOWS * BLOCKS_EACH, num_windows=1 + WINDOWS)


def opened() -> OpenedGpuV41:
    return OpenedGpuV41(shallow_v41(), block_tokens=None, device=DEVICE, progress=lambda *_: None)


@torch.inference_mode()
def begin(*sequences: int) -> None:
    """Empty windows and blocks of some sequences, in both models."""
    model = gpu_model()
    for sequence in sequences:
        start(PLAIN, sequence)
        model.reset_window(sequence)
        for block in blocks_of(sequence):
            model.write_block(block, bytes(model.layout.block_bytes))


@torch.inference_mode()
def compute(*rows: Row) -> Tensor:
    """Logits of each row's last token, by the GPU's model."""
    return gpu_model().forward(Batch(rows), every_row=True).cpu()


def both(*rows: Row) -> tuple[Tensor, Tensor]:
    """Of the CPU's model, and of the GPU's, which then goes on from the CPU's state."""
    made = run(PLAIN, *rows), compute(*rows)
    _align(rows)
    return made


@torch.inference_mode()
def _align(rows: Sequence[Row]) -> None:
    """Kernels round otherwise than the CPU, and a rare flip would be in every later step's past: take the CPU's."""
    if DEVICE.type != "cuda":
        return
    plain, model = model_of(PLAIN), gpu_model()
    for row in rows:
        for block in blocks_of(row.sequence)[: -(-(row.position + len(row.token_ids)) // model.layout.block_tokens)]:
            model.write_block(block, plain.read_block(block))
        model.write_window(row.window, plain.read_window(row.window, encoder_only=False))


def rel(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def is_alike(got: Tensor, expected: Tensor) -> bool:
    """Kernels against the CPU, row by row: of more than two rows a quarter may differ by more than KERNELS_SAME.

    Of one or two rows none may differ by more than TIED: a tie that goes to another expert moves a row by 0.25 to 0.5.
    """
    sizes = expected.flatten(1).norm(dim=1).clamp_min(1e-30)
    each = [float(row) for row in (got - expected).flatten(1).norm(dim=1) / sizes]
    if len(each) <= 2:
        return not any(error > TIED or isnan(error) for error in each)
    return sum(error > KERNELS_SAME or isnan(error) for error in each) <= -(-len(each) // 4)


LEAST_BYTES = 0.6
"""Of a block some of whose layers' records may differ."""
KERNELS_SAME = 0.2
"""Of values, where the kernels themselves compute: their attention rounds softmax weights to bf16, which fp8 amplifies."""
TIED = 0.6
"""Of values of a row for which another expert was chosen."""


class Led:
    """A layer that starts from what the CPU's model had there, and whose outcome is compared."""

    def __init__(self, layer: Layer, number: int, seen: dict[str, Tensor]) -> None:
        self._layer, self._name, self._seen = layer, f"layers.{number}", seen

    def fetch(self, step: Step, compressed: Tensor, *, is_aside: bool) -> None:
        self._layer.fetch(step, compressed, is_aside=is_aside)

    def run(self, step: Step, state: State) -> State:
        if not step.memories or min(step.memories) > int(self._name.partition(".")[2]):
            state = self._led(state)
        done = self._layer.run(step, state)
        for name, got in (("stream_mid", done.streams), ("ffn_out", done.output)):
            expected = self._seen[f"{self._name}.{name}"]
            assert got is not None
            made = got[: len(expected)].float().cpu()
            same = is_alike(made, expected) if runs_kernels(got) else rel(made, expected) < SAME
            assert same, f"{self._name}.{name}"
        return done

    def _led(self, state: State) -> State:
        """Rows of padding are left as they are.  A layer's n-gram memory is in what the CPU shows: not led there."""
        device = state.streams.device
        streams, pre = (self._seen[f"{self._name}.{each}"].to(device) for each in ("stream_in", "pre_in"))
        led, by = state.streams.clone(), state.made.pre.clone()
        led[: len(streams)], by[: len(pre)] = streams.bfloat16(), pre
        return State(led, None, Coefficients(by, state.made.post, state.made.mix))


@contextmanager
def walking() -> Iterator[None]:
    """A captured step is one piece: on a GPU, let the layers be run one after another."""
    graphs = gpu_model()._graphs
    if DEVICE.type == "cuda":
        vars(graphs)["takes"] = lambda _: False
    try:
        yield
    finally:
        vars(graphs).pop("takes", None)


@torch.inference_mode()
def assert_same_step(*rows: Row, interpreting: bool = False) -> None:
    """Both models compute a step alike, layer by layer, and leave the same records behind.

    interpreting: by the kernels themselves, in Triton's interpreter.  On a GPU they are launched one by one.
    """
    watch, model, by_kernels = Watcher(), gpu_model(), interpreting or DEVICE.type == "cuda"
    expected, layers = run(PLAIN, *rows, watch=watch), model.stack.layers
    model.stack.layers = _led(layers, watch)
    try:
        with interpreted() if interpreting else nullcontext(), walking():
            got = compute(*rows)
    finally:
        model.stack.layers = layers
    assert is_alike(got, expected) if by_kernels else rel(got, expected) < SAME
    # Layers with n-gram memory start from the layer before: where kernels round otherwise, so do they.
    unlike = model.info.engram.layers if by_kernels else ()
    for row in rows:
        assert_same_records(row.sequence, row.position + len(row.token_ids), unlike=unlike)
    _align(rows)


@torch.inference_mode()
def assert_same_layers(count: int, row: Row, watch: Watcher) -> None:
    """The kernels themselves, interpreted, compute the first layers of a step as `watch` has seen them."""
    stack = gpu_model().stack
    laid = gpu_model().lay(Batch((row,)))
    with interpreted():
        step, state = stack.begin(laid), stack.enter(laid)
        for layer in _led(stack.layers[:count], watch):
            state = layer.run(step, state)
    memories = gpu_model().info.engram.layers
    for number in set(range(count)) - set(memories):
        assert_same_ring(row.sequence, number)


def _led(layers: Sequence[Layer], watch: Watcher) -> tuple[Layer, ...]:
    return tuple(cast("Layer", Led(layer, number, watch.seen)) for number, layer in enumerate(layers))


@torch.inference_mode()
def assert_same_records(sequence: int, num_tokens: int, *, unlike: Sequence[int] = ()) -> None:
    """Blocks, rings of main and drafter layers by their bytes; the compressors' rings, which are sums, by value.

    unlike: layers whose records may differ; their share of a block may then, too.
    """
    plain, model = model_of(PLAIN), gpu_model()
    for block in blocks_of(sequence)[: -(-num_tokens // model.layout.block_tokens)]:
        assert share(plain.read_block(block), model.read_block(block)) >= (LEAST_BYTES if unlike else SAME_BYTES), block
    for layer in range(model.info.num_layers + model.info.drafter.num_layers):
        if layer not in unlike:
            assert_same_ring(sequence, layer)


@torch.inference_mode()
def assert_same_ring(sequence: int, layer: int) -> None:
    """One layer's records in a window state, and what its compressor remembers if it has one."""
    plain, model = model_of(PLAIN), gpu_model()
    expected, got = (each.read_window(sequence, encoder_only=False) for each in (plain, model))
    for stream in [each for each in model.layout.window_streams if each.layer == layer]:
        theirs, ours = expected[stream.offset : stream.end], got[stream.offset : stream.end]
        if stream.name == "compressor":
            values = [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (theirs, ours)]
            assert (values[0] - values[1]).norm() <= SAME * values[0].norm()
        else:
            assert share(theirs, ours) >= SAME_BYTES, stream


def share(expected: bytes, got: bytes) -> float:
    """Of bytes that are the same."""
    a, b = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (expected, got))
    return float((a == b).float().mean())


@torch.inference_mode()
def records(sequence: int, num_tokens: int) -> tuple[bytes, ...]:
    """The GPU's model's blocks and window of a sequence."""
    model = gpu_model()
    blocks = blocks_of(sequence)[: -(-num_tokens // model.layout.block_tokens)]
    return (*(model.read_block(block) for block in blocks), model.read_window(sequence, encoder_only=False))
