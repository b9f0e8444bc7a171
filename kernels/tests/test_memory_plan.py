"""The plan of a device's memory adds up, fills what it may, and says what to do when it does not fit."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.memory_plan import LEAST_BLOCKS, Need, NoRoom, check_host, margin_bytes, plan_blocks

GIB = 1 << 30
NEED = Need(weights=16 * GIB, workspace=2 * GIB, graphs=GIB, windows=GIB // 2)
BYTES = st.integers(0, 1 << 40)


@settings(max_examples=60)
@given(st.builds(Need, weights=BYTES, workspace=BYTES, graphs=BYTES, windows=BYTES), BYTES, st.integers(1, 1 << 26))
def test_a_plan_adds_up_and_leaves_less_than_a_block(need: Need, free: int, block_bytes: int) -> None:
    """Or there is no plan: then two blocks would not have fitted."""
    try:
        plan = plan_blocks(need, free=free, block_bytes=block_bytes)
    except NoRoom:
        assert need.total + margin_bytes(free) + LEAST_BLOCKS * block_bytes > free
        return
    assert free == need.total + plan.margin + plan.num_blocks * block_bytes + plan.left
    assert 0 <= plan.left < block_bytes
    assert LEAST_BLOCKS <= plan.num_blocks


def test_it_reads_as_one_line_and_as_fields() -> None:
    """What is not there is not named; sizes are in bytes for a log."""
    plan = plan_blocks(NEED, free=24 * GIB, block_bytes=GIB // 4, num_blocks=10)

    assert (
        "device memory: 24.00 GiB free = 16.00 GiB weights + 2.00 GiB workspace of a step + 1.00 GiB graphs"
        " + 0.50 GiB windows + 1.00 GiB margin + 2.50 GiB for 10 KV blocks + 1.00 GiB left"
    ) == plan.describe()
    assert "windows" not in plan_blocks(Need(weights=1, workspace=1), free=4 * GIB, block_bytes=GIB).describe()
    assert {"num_blocks": 10, "left_bytes": GIB, "blocks_bytes": 10 * GIB // 4}.items() <= plan.fields().items()


@pytest.mark.parametrize(
    ("free", "num_blocks", "said"),
    [
        (24 * GIB, 15, f"set kv_bytes to {14 * GIB // 4} or less, or leave it unset"),
        (12 * GIB, None, "weights alone do not fit"),
        (19 * GIB, None, "take fewer tokens per step, or end what else"),
        (21 * GIB - GIB // 4, None, "take fewer tokens per step, or take fewer sequences at a time, or end"),
    ],
    ids=["too many blocks", "weights", "workspace", "windows"],
)
def test_what_does_not_fit_is_said_with_its_cure(free: int, num_blocks: int | None, said: str) -> None:
    """And by how much."""
    with pytest.raises(NoRoom, match=said) as caught:
        plan_blocks(NEED, free=free, block_bytes=GIB // 4, num_blocks=num_blocks)

    assert "GiB missing. " in str(caught.value)


def test_a_dense_model_says_what_it_takes() -> None:
    """Llama-8B: 16.06 GB of weights; more tokens a step want more workspace, captured steps keep their logits."""
    pytest.importorskip("triton", reason="Triton is not installed: there is no GPU model to plan for")
    from kernels.kv.layout import KvLayout
    from kernels.models.config import ModelConfig, RopeConfig
    from kernels.models.gpu.memory import dense_need

    config = ModelConfig(
        "LlamaForCausalLM",
        128_256,
        4096,
        32,
        32,
        8,
        128,
        14_336,
        1e-5,
        RopeConfig(500_000.0),
        8192,
        tie_embeddings=False,
    )
    layout = KvLayout.dense(num_layers=32, block_tokens=128, num_kv_heads=8, head_dim=128, dtype="bf16")
    few, many = (dense_need(config, layout, step_tokens=tokens) for tokens in (512, 16_384))
    captured = dense_need(config, layout, graph_sizes=(1, 256), num_sequences=1024)

    assert 16.06 == round(few.weights / 1e9, 2)
    assert 2 * (16_384 - 512) * (3 * 14_336 + 4 * 4096 + 2 * 6144) == many.workspace - few.workspace
    assert captured.graphs - few.graphs > 257 * 128_256 * 4
    assert 1024 * 64 * 4 == captured.weights - few.weights


def test_tables_that_the_host_cannot_pin_are_said_with_their_size() -> None:
    """Before anything is loaded; what fits is not spoken of."""
    check_host(203 * GIB, available=203 * GIB, what="n-gram tables")
    with pytest.raises(
        NoRoom, match=r"n-gram tables take 203.00 GiB of the host's memory.* 3.00 GiB missing. Give this"
    ):
        check_host(203 * GIB, available=200 * GIB, what="n-gram tables")


def test_the_hosts_memory_is_what_the_tightest_limit_leaves(tmp_path: Path) -> None:
    """Of the kernel and of all control groups above this process; cached files give way."""
    pytest.importorskip("triton", reason="Triton is not installed: there is no GPU model to plan for")
    from kernels.models.gpu.memory import available_host_bytes

    def write(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    assert 8 * GIB == available_host_bytes(tmp_path)
    write("proc/self/cgroup", "0::/pods/engine\n")
    write("sys/fs/cgroup/pods/memory.max", f"{6 * GIB}\n")
    write("sys/fs/cgroup/pods/memory.current", f"{4 * GIB}\n")
    write("sys/fs/cgroup/pods/memory.stat", f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB}\n")
    write("sys/fs/cgroup/pods/engine/memory.max", "max\n")
    write("sys/fs/cgroup/pods/engine/memory.current", f"{4 * GIB}\n")
    assert 4 * GIB == available_host_bytes(tmp_path)


def test_a_refusal_to_pin_is_no_riddle() -> None:
    """What the library says of it names neither the tables nor a cure; other errors stay what they are."""
    pytest.importorskip("triton", reason="Triton is not installed: there is no GPU model to plan for")
    from kernels.models.gpu.memory import as_pinned

    with pytest.raises(NoRoom, match="n-gram tables take"), as_pinned(GIB, "n-gram tables"):
        raise RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="wrong shape"), as_pinned(GIB, "n-gram tables"):
        raise RuntimeError("wrong shape")
