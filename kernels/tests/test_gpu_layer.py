"""The one kernel of a decode step gives what the kernels of its parts give."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.models.config import ModelConfig, parse_config, read_config
from kernels.models.gpu import one_kernel
from kernels.models.gpu.forward import Stack, Tokens
from kernels.models.gpu.one_kernel import OneKernel, stacks_of
from kernels.models.gpu.weights import GpuLayer, GpuWeights, heads_of, load_weights
from kernels.models.weights import open_weights
from kernels.ops import gpu_layer
from kernels.ops.gpu_layer_cut import Cut, cut_for
from kernels.ops.gpu_layers import Scratch, Stacks, joined, run_layers
from kernels.ops.gpu_rope_cache import Paging, Turning
from kernels.tests.gluon_in_python import Machine
from kernels.tests.tiny_models import write_tiny

PROGRAMS = 32
CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 2048,
        "max_position_embeddings": 640,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
    {},
)


def cut_of(config: ModelConfig, rows: int, programs: int = PROGRAMS) -> Cut | None:
    return cut_for(
        rows,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn_size,
        block_tokens=128,
        programs=programs,
    )


def random_model(config: ModelConfig) -> tuple[GpuWeights, Stacks]:
    """Whose head multiplies by one, so that its logits are the last norm's rows."""
    hidden, dim, count = config.hidden_size, config.head_dim, config.num_layers

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(shape).mul_(float(shape[-1]) ** -0.5).bfloat16()

    qkv = bf16(count, (config.num_heads + 2 * config.num_kv_heads) * dim, hidden)
    output, gate_up = bf16(count, hidden, config.num_heads * dim), bf16(count, 2 * config.ffn_size, hidden)
    down, norms = bf16(count, hidden, config.ffn_size), 1 + bf16(2 * count + 1, hidden)
    embedding = (torch.randn(config.vocab_size, hidden)).bfloat16()
    angles = torch.arange(640)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    turning = Turning(angles.cos(), angles.sin())
    layers = tuple(
        GpuLayer(norms[2 * at], norms[2 * at + 1], qkv[at], output[at], None, gate_up[at], down[at], turning)
        for at in range(count)
    )
    weights = GpuWeights(embedding, layers, norms[-1], torch.eye(hidden).bfloat16())
    matrices = [joined(list(each)) for each in (qkv, output, gate_up, down)]
    first, second, third, fourth = (each for each in matrices if each is not None)
    return weights, Stacks(first, second, third, fourth, norms, embedding)


def in_python(monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> None:
    """Let the wrapper launch the kernel's source in Python."""

    class Launcher:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, CUT: Cut, **_: Any) -> None:
                Machine(is_late=is_late).run(kernel, grid[0], args, {"CUT": CUT})

            return launch

    kernel = gpu_layer.layers_kernel
    monkeypatch.setattr(gpu_layer, "layers_kernel", Launcher())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "is_late", "fetching"),
    [
        pytest.param((0, 63, 200), False, (3, False, 0), marks=pytest.mark.long),
        ((517,), True, (3, False, 0)),
        ((64, 5, 129, 320, 2), True, (5, True, 2)),
        ((130, 7), False, (4, True, 4)),
    ],
)
def test_a_step_in_one_kernel_equals_its_parts(
    positions: tuple[int, ...], is_late: bool, fetching: tuple[int, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden rows, and the keys and values it leaves; a row of padding stores nothing and disturbs nobody."""
    torch.manual_seed(len(positions))
    weights, stacks = random_model(CONFIG)
    count, most = len(positions) + 1, 5
    tables = torch.zeros(count + 1, most, dtype=torch.int32)
    tables[1:] = (1 + torch.randperm(count * most)).view(count, most).int()
    cache = torch.randn(1 + count * most, CONFIG.num_layers, 2, 128, CONFIG.num_kv_heads * 128).bfloat16()
    same = cache.clone()
    ids = torch.randint(0, CONFIG.vocab_size, (count,))
    rows = torch.tensor([*range(1, count), 0], dtype=torch.int32)
    places = torch.tensor([*positions, 0], dtype=torch.int32)
    cut = cut_of(CONFIG, count)
    assert cut is not None
    stages, has_feeder, near = fetching
    cut = replace(cut, stages=stages, has_feeder=has_feeder, near=near)

    def paging(data: torch.Tensor) -> list[Paging]:
        return [Paging(data[:, at], tables) for at in range(CONFIG.num_layers)]

    tiles = torch.tensor(
        [(row, at, 1 if row else 0, place) for at, (row, place) in enumerate(zip(rows, places, strict=True))],
        dtype=torch.int32,
    )
    expected = Stack(CONFIG, weights, paging(cache), invariant=True).forward(Tokens(ids, rows, places, tiles))
    in_python(monkeypatch, is_late=is_late)
    scratch = Scratch.of(cut, torch.device("cpu"))
    turning = weights.layers[0].turning
    got = run_layers(ids, rows, places, stacks, turning, paging(same), scratch, cut, eps=CONFIG.norm_eps)

    assert heads_of(CONFIG).head_dim == 128
    torch.testing.assert_close(expected[:-1], got[:-1].float(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(cache, same, rtol=0.05, atol=0.05)
    assert cache.ne(same).sum() < same.numel() // 100


@pytest.mark.slow
def test_a_stack_takes_decode_steps_of_few_tokens_through_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the logits that its layers give one by one."""
    torch.manual_seed(3)
    weights, _ = random_model(CONFIG)
    tables = torch.tensor([[0, 0], [1, 2], [3, 4]], dtype=torch.int32)
    ids, places = torch.tensor([5, 700]), torch.tensor([70, 128], dtype=torch.int32)
    rows = torch.tensor([1, 2], dtype=torch.int32)
    tiles = torch.tensor([(1, 0, 1, 70), (2, 1, 1, 128)], dtype=torch.int32)
    cache = torch.randn(5, CONFIG.num_layers, 2, 128, CONFIG.num_kv_heads * 128).bfloat16()
    paging = [Paging(cache[:, at], tables) for at in range(CONFIG.num_layers)]
    stack, stacks = Stack(CONFIG, weights, paging, invariant=False), stacks_of(weights)
    expected = stack.forward(Tokens(ids, rows, places, tiles))

    in_python(monkeypatch, is_late=True)
    monkeypatch.setattr(one_kernel, "cut_for", partial(cut_for, programs=PROGRAMS))
    assert stacks is not None
    monkeypatch.setattr(stack, "_one_kernel", OneKernel(CONFIG, weights, paging, stacks))
    got = stack.forward(Tokens(ids, rows, places, tiles, is_decode=True))

    assert not torch.equal(expected, got), "the same way was taken"
    torch.testing.assert_close(expected, got, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("family", "fits"), [("mistral", True), ("llama", False), ("qwen3", False)])
def test_loaded_matrices_of_a_kind_lie_one_after_the_other(family: str, fits: bool, tmp_path: Path) -> None:
    """As one kernel takes them; not where a model has biases or norms of heads."""
    folder = write_tiny(family, tmp_path)
    config = read_config(folder)
    source = open_weights(folder, lambda *_: None)
    stacks = stacks_of(load_weights(config, source, torch.device("cpu"), lambda *_: None))

    assert fits == (stacks is not None)
    if stacks is not None:
        last = f"model.layers.{config.num_layers - 1}."
        down = source.tensor(f"{last}mlp.down_proj.weight").bfloat16()
        assert torch.equal(down, stacks.down[-config.hidden_size :])
        assert torch.equal(source.tensor(f"{last}post_attention_layernorm.weight").bfloat16(), stacks.norms[-2])


@pytest.mark.parametrize(
    ("rows", "changed", "fits"),
    [
        (8, {}, True),
        (9, {}, False),
        (1, {"head_dim": 64}, False),
        (1, {"block_tokens": 32}, False),
        (1, {"ffn": 14_080}, False),
        (1, {"hidden": 8192, "heads": 64, "ffn": 28_672}, False),  # eight queries of a KV head, its key and value
    ],
)
def test_dimensions_that_do_not_divide_are_refused(rows: int, changed: dict[str, int], fits: bool) -> None:
    """The programs' shares are whole; what does not fit keeps a kernel for each product."""
    llama = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14_336}
    cut = cut_for(rows, **({"block_tokens": 128} | llama | changed))

    assert fits == (cut is not None)
