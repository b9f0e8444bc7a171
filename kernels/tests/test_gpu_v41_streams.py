"""Streams and n-gram memory on a GPU: the kernels, interpreted, against their twins and the golden streams."""

import pytest
import torch
from safetensors import safe_open

from kernels.ops.engram import hash_tables
from kernels.ops.hyper import Coefficients, first_pre
from kernels.tests.golden_files import golden, tiny_v41

pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels here, is not installed")

from kernels.ops import gpu_hyper, gpu_hyper_rows
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_engram import HashNumbers, add_memory, read_rows, table_rows
from kernels.ops.gpu_hyper import Cut, MixingWeights, enter, leave, split_weight
from kernels.ops.gpu_launch import interpreted

CPU = torch.device("cpu")
TOKENS, HIDDEN = 5, 96


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_hyper, "SLICE", 64)
    monkeypatch.setattr(gpu_hyper, "ENTER", Cut(tokens=4, step=32))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(name: str) -> torch.Tensor:
    with safe_open(tiny_v41() / "model.safetensors", "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor.float()


def stored(layer: int, sublayer: str) -> MixingWeights:
    prefix = f"layers.{layer}.hc_{sublayer}"
    return MixingWeights(
        split_weight(read(f"{prefix}_fn")), read(f"{prefix}_scale"), read(f"{prefix}_base"),
        read(f"layers.{layer}.{sublayer}_norm.weight"), 1e-20, 1e-6, 20,
    )  # fmt: skip


def test_a_split_weight_is_the_weight() -> None:
    """Three bf16 parts hold all but the last bits of fp32."""
    weight = draw(24, 64)
    torch.testing.assert_close(weight, split_weight(weight).float().sum(0)[:24], rtol=1e-7, atol=0)


@pytest.mark.slow
def test_a_sublayer_enters_and_leaves_with_the_golden_streams() -> None:
    """From a layer's streams and attention output follow its middle streams, its MoE's input and what is handed over."""
    some, prefix = slice(20, 22), "n48.quant.layers.1"
    streams, output = (golden(f"{prefix}.{name}")[some].bfloat16() for name in ("stream_in", "attn_out"))
    before = Coefficients(*(torch.zeros(2, *size) for size in ((4,), (4,), (4, 4))))
    with interpreted():
        first = enter(
            streams, None, before, stored(1, "attn"), pre=golden(f"{prefix}.pre_in")[some].float().contiguous()
        )
        second = enter(streams, output, first.made, stored(1, "ffn"))

    expected = {"stream_mid": second.streams, "pre_mid": first.made.pre, "ffn_in": second.x, "attn_in": first.x}
    for name, got in expected.items():
        wanted = golden(f"{prefix}.{name}")[some].float()
        assert (got.float() - wanted).norm() / wanted.norm() < 0.01, name


@pytest.mark.slow
@pytest.mark.parametrize("by_slices", [False, True], ids=["whole rows", "slices"])
@pytest.mark.parametrize(("has_output", "is_invariant", "is_beside"), [(1, 1, 0), (0, 1, 1), (0, 0, 0), (1, 0, 1)])
def test_streams_go_on_as_by_the_twin(
    has_output: int, is_invariant: int, is_beside: int, by_slices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden size that is no multiple of a slice; a token of zeros; the first layer's one-hot weights; in two parts."""
    if by_slices:  # three turns are too many
        monkeypatch.setattr(gpu_hyper_rows, "_MOST_TURNS", 2)
    assert by_slices != gpu_hyper_rows.takes(HIDDEN)
    streams, output = draw(TOKENS, 4, HIDDEN).bfloat16(), draw(TOKENS, HIDDEN, seed=1).bfloat16()
    streams[4], output[4] = 0.0, 0.0
    made = Coefficients(first_pre(TOKENS, CPU), draw(TOKENS, 4, seed=2).abs(), draw(TOKENS, 4, 4, seed=3).abs())
    weights = MixingWeights(
        split_weight(draw(24, 4 * HIDDEN) * 0.1), torch.tensor([0.5, 1.0, 2.0]), draw(24), draw(HIDDEN).abs(), 1e-20,
        1e-6, 20,
    )  # fmt: skip
    given = output if has_output else None
    expected, beside = enter(streams, given, made, weights), Beside(CPU) if is_beside else None
    with interpreted():
        got = enter(streams, given, made, weights, is_invariant=bool(is_invariant), beside=beside)
        left = leave(streams, output, made)

    assert torch.equal(expected.streams, got.streams)
    torch.testing.assert_close(expected.x, got.x, rtol=0.01, atol=1e-3)
    torch.testing.assert_close(expected.rounded, got.rounded, rtol=0.1, atol=1e-3)
    for name in ("pre", "post", "mix"):
        torch.testing.assert_close(getattr(expected.made, name), getattr(got.made, name), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.ones(TOKENS, 4), got.made.mix.sum(1), rtol=0, atol=1e-3)
    assert torch.equal(enter(streams, output, made, weights).streams, left)


@pytest.mark.slow
def test_memory_is_found_read_and_let_in() -> None:
    """Rows of the hash tables, their stored values exactly, and a gate for each stream; image tokens stay."""
    tables = hash_tables([1, 3], vocab_size=97, heads=2, max_ngram=4, compressed_vocab_size=90)[3]
    windows = torch.randint(0, 90, (TOKENS, 4), generator=torch.Generator().manual_seed(0))
    numbers = HashNumbers.of(tables, CPU)
    data = torch.randint(0, 0x7F, (tables.num_rows, 64), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    scale = torch.randint(110, 130, (tables.num_rows, 2), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    streams, kept = draw(TOKENS, 4, HIDDEN).bfloat16(), draw(TOKENS, 5 * HIDDEN, seed=1).bfloat16()
    weight, images = draw(4, HIDDEN, seed=2), torch.tensor([False, True, False, False, False])
    rows = table_rows(windows, numbers)
    expected = rows, read_rows(rows, data, scale), add_memory(streams, kept, weight, images, eps=1e-20)
    with interpreted():
        got = (
            table_rows(windows, numbers),
            read_rows(rows, data, scale),
            add_memory(streams, kept, weight, images, eps=1e-20),
        )

    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])
    torch.testing.assert_close(expected[2], got[2], rtol=0.01, atol=1e-3)
    assert torch.equal(streams[1], got[2][1])
