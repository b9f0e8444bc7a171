"""The door to the device keeps blocks, tokens and errors straight."""

import pytest
import torch

from kernels.batch import Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.models.model import BadBatch
from kernels.tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0.0)
IDS = [(index * 37 + 11) % 320 for index in range(300)]


@pytest.fixture(scope="module")
def executor(tmp_path_factory) -> Executor:
    return Executor.load(write_tiny("llama", tmp_path_factory.mktemp("tiny")), dtype="bf16", threads=1, num_blocks=16)


def test_blocks_carry_a_sequence_to_another_executor(executor, tmp_path) -> None:
    """KV read here and written there continues with the same bits: what a handoff relies on."""
    other = Executor.load(write_tiny("llama", tmp_path), dtype="bf16", threads=1, num_blocks=16)
    assert executor.fingerprint == other.fingerprint
    expected = executor.logits(Batch((Row(0, IDS, 0, (1, 2, 3)),)))
    executor.logits(Batch((Row(0, IDS[:290], 0, (4, 5, 6)),)))
    for here, there in ((4, 9), (5, 7), (6, 8)):
        payload = executor.read_block(here)
        assert len(payload) == executor.layout.block_bytes
        other.write_block(there, memoryview(payload))
        assert payload == other.read_block(there)

    assert torch.equal(expected, other.logits(Batch((Row(0, IDS[290:], 290, (9, 7, 8)),))))


def test_rows_without_sampling_give_no_token(executor) -> None:
    """Only rows that want a token return one, in row order."""
    rows = (
        Row(5, IDS[:9], 0, (1,), GREEDY),
        Row(6, IDS[:40], 0, (2,)),
        Row(7, IDS[:3], 0, (3,), SamplingParams(temperature=0.0, num_logprobs=2)),
    )
    sampled = executor.collect(executor.launch(Batch(rows)))

    assert [5, 7] == [each.sequence for each in sampled]
    assert (sampled[0].logprob, sampled[0].top) == (None, ())
    assert sampled[1].top[0] == (sampled[1].token_id, sampled[1].logprob)
    assert 2 == len(sampled[1].top)
    assert () == executor.collect(executor.launch(Batch(rows[1:2])))


def test_a_row_with_nan_harms_no_batch_mate(executor) -> None:
    """Poisoned KV gives that row a problem, its mate the usual token, and the block is clean for its next owner."""
    clean = executor.logits(Batch((Row(0, IDS[:100], 0, (1,)),)))
    executor.logits(Batch((Row(0, IDS[:64], 0, (2,)),)))
    nan = torch.full((executor.layout.block_bytes // 2,), float("nan"), dtype=torch.bfloat16)
    executor.write_block(2, nan.view(torch.uint8).numpy().tobytes())
    rows = (Row(1, IDS[99:100], 99, (1,), GREEDY), Row(2, [5], 64, (2,), GREEDY))
    mate, poisoned = executor.collect(executor.launch(Batch(rows)))

    assert (int(clean.argmax()), None) == (mate.token_id, mate.problem)
    assert -1 == poisoned.token_id
    assert poisoned.problem
    assert torch.equal(clean, executor.logits(Batch((Row(0, IDS[:100], 0, (2,)),))))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row(3, (), 0, (1,)), "at least one token"),
        (Row(3, (1,), 128, (1,)), "needs 2 blocks for 129 tokens; its table has 1"),
        (Row(3, (1,), 0, (0,)), "block ids lie in 1..15"),
        (Row(3, (1,), 0, (16,)), "block ids lie in 1..15"),
        (Row(3, (320,), 0, (1,)), "token ids lie in 0..319"),
        (Row(3, (1,), 1024, range(1, 10)), "reaches 1025 tokens; the model takes 1024"),
    ],
)
def test_impossible_rows_are_refused(executor, row, why) -> None:
    """A scheduling mistake is named; nothing is computed."""
    with pytest.raises(BadBatch, match=why):
        executor.launch(Batch((row,)))


def test_an_empty_batch_is_refused(executor) -> None:
    """A step without rows is a scheduling mistake."""
    with pytest.raises(BadBatch, match="at least one row"):
        executor.launch(Batch(()))


def test_blocks_of_another_size_are_refused(executor) -> None:
    """A payload of the wrong size and ids outside the pool never reach the cache."""
    with pytest.raises(ValueError, match="the payload 3"):
        executor.write_block(1, b"abc")
    for block_id in (0, 16, -1):
        with pytest.raises(ValueError, match=r"not one of 1\.\.15"):
            executor.read_block(block_id)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dtype": "fp8"}, "none of bf16, fp32, int8"),
        ({"num_blocks": 1}, "at least 2"),
        ({"kv_bytes": 100}, "at least 2"),
        ({"kv_bytes": 1 << 20, "num_blocks": 4}, "not both"),
        ({"block_tokens": 48}, "does not divide 128"),
    ],
)
def test_impossible_settings_are_refused(settings, why, tmp_path) -> None:
    """Every setting that cannot work says so at load."""
    folder = write_tiny("mistral", tmp_path)
    with pytest.raises(ValueError, match=why):
        Executor.load(folder, **({"dtype": "fp32", "threads": 1} | settings))


def test_fingerprint_tells_apart_what_must_not_share_blocks(tmp_path) -> None:
    """Another dtype, block length or weight gives another fingerprint; the same folder loaded twice does not."""
    folder = write_tiny("mistral", tmp_path / "a")

    def fingerprint(where=folder, *, dtype="fp32", num_blocks=4, block_tokens=128):
        executor = Executor.load(where, dtype=dtype, num_blocks=num_blocks, block_tokens=block_tokens, threads=1)
        return executor.fingerprint

    base = fingerprint()
    assert 32 == len(base)
    assert base == fingerprint(num_blocks=8)
    others = [fingerprint(dtype="bf16"), fingerprint(dtype="int8"), fingerprint(block_tokens=64)]
    others.append(fingerprint(write_tiny("mistral", tmp_path / "b", dtype=torch.bfloat16)))
    assert 5 == len({base, *others})


def test_load_reports_progress(tmp_path) -> None:
    """Someone waiting sees stages that reach their end."""
    seen = []
    executor = Executor.load(
        write_tiny("mistral", tmp_path), dtype="fp32", threads=1, num_blocks=4, progress=lambda *at: seen.append(at)
    )
    executor.warm_up(lambda *at: seen.append(at))

    for stage in ("load weights", "prove row tiles", "warm up"):
        last = [at for at in seen if at[0] == stage][-1]
        assert last[1] == last[2]
