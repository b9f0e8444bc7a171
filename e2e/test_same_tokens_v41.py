"""Do the same tokens come out of DeepSeek-V4.1 whichever path they took?

A tiny checkpoint in the real format (window 16, block 16, every mechanism of the large one); its greedy answers are also
those of an independent reference.
"""

import random
import shutil
from pathlib import Path

import pytest

from e2e.client import SEEDED, complete_all
from e2e.paths import MAX_TOKENS, expected_tokens, tokens_of
from e2e.prompts import Prompt
from e2e.suite import Suite
from kernels.tests.golden_files import golden, golden_json, tiny_v41
from services.chassis.window_store import folders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 16
WINDOW = 16
REACH = 22  # window and the six tokens that can be taken back
EXACT = 12 * (WINDOW - 1)  # tokens that make every layer's window exact
# Around 1, the window, twice the window, the top 16 entries (per token, and per two tokens), the 8 candidate blocks of
# 8 entries, whole blocks, and far beyond all of them.
LENGTHS = (1, 2, 15, 16, 17, 22, 31, 32, 33, 47, 48, 49, 63, 64, 65, 71, 79, 80, 81, 127, 128, 129, 257, 300, 500)
TOKEN_BY_TOKEN = (2, 15, 16, 17, 33)  # a prompt passes through all shorter ones' states on its way
ALONE = {"num_blocks": 200, "threads": 1}
SHORT_POOL = {"FATHOM_DECODE_KV_BYTES": str(1 << 16)}  # 28 blocks


def draw(length: int) -> Prompt:
    """A prompt that no other is a prefix of."""
    source = random.Random(length)
    return Prompt(f"length-{length}", (length % 311 + 3, *(source.randrange(3, 256) for _ in range(length - 1))))


PROMPTS = [draw(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return tiny_v41()


@pytest.fixture(scope="module")
def expected(model_dir):
    return expected_tokens(model_dir, PROMPTS, dtype="fp32", **ALONE)


def hit_with_state(num_tokens: int) -> int:
    """Whole blocks that leave a window and its reserve to compute: there the last run saved a state."""
    return max(num_tokens - REACH, 0) // BLOCK * BLOCK


def hit_without_state(num_tokens: int) -> int:
    """The same blocks, less the tokens that rebuild the windows exactly."""
    return max(hit_with_state(num_tokens) - EXACT, 0)


def lose_window_states() -> None:
    """What a reboot of the host does."""
    for folder in folders():
        shutil.rmtree(folder, ignore_errors=True)


async def answers_of(suite: Suite) -> tuple[dict[str, tuple[int, ...]], list[int]]:
    """Seeded tokens by prompt, and the cached tokens in the prompts' order."""
    found = await complete_all(
        suite.base_url, [p.token_ids for p in PROMPTS], at_once=1, max_tokens=MAX_TOKENS, sampling=SEEDED
    )
    return {p.name: a.token_ids for p, a in zip(PROMPTS, found, strict=True)}, [a.cached_tokens for a in found]


def test_chunks_and_batch_mates_change_nothing(model_dir, expected):
    """One token at a time beside the others' decode steps; chunks of 37 go through services below, with all prompts."""
    wanted = [p for p in PROMPTS if len(p.token_ids) in TOKEN_BY_TOKEN]
    found = expected_tokens(model_dir, wanted, dtype="fp32", chunk_tokens=1, at_once=8, **ALONE)

    assert {name: {p.name: answers[p.name] for p in wanted} for name, answers in expected.items()} == found


async def test_split_batched_and_warm_with_and_without_windows(model_dir, expected, tmp_path):
    """One prefill and one decode: cold with batch mates, warm with the saved windows, warm without them.

    In each state, three more prompts get an independent reference's greedy tokens.
    """
    names = ("n5", "n17", "n48")
    prompts = [golden(f"seq.{name}.ids").tolist() for name in names]
    reference = [tuple(golden_json(f"greedy/greedy.kvq.{name}")["tokens"]) for name in names]
    async with Suite.running(tmp_path, model=model_dir, dtype="fp32") as suite:

        async def greedy():
            found = await complete_all(suite.base_url, prompts, at_once=1, max_tokens=len(reference[0]))
            return [a.token_ids for a in found]

        assert reference == await greedy()
        assert expected == await tokens_of(suite, PROMPTS, at_once=8)
        assert (expected["seeded"], [hit_with_state(n) for n in LENGTHS]) == await answers_of(suite)
        assert reference == await greedy()

        await suite.restart_engines()  # empty pools: blocks come from kvstore, windows from the host's memory
        assert (expected["seeded"], [hit_with_state(n) for n in LENGTHS]) == await answers_of(suite)

        await suite.restart_engines(lose_window_states)
        assert (expected["seeded"], [hit_without_state(n) for n in LENGTHS]) == await answers_of(suite)
        assert reference == await greedy()


async def test_two_prefill_and_two_decode_replicas_in_odd_chunks(model_dir, expected, tmp_path):
    """Which replica computed what, in which pieces, does not show in the tokens."""
    env = {"FATHOM_PREFILL_CHUNK_TOKENS": "37"}
    async with Suite.running(tmp_path, model=model_dir, dtype="fp32", prefill=2, decode=2, env=env) as suite:
        assert expected == await tokens_of(suite, PROMPTS, at_once=8)


@pytest.mark.long  # the decode service's tests have the same promise, with replicas in one process
async def test_preempted_sequences_give_the_same_tokens(model_dir, tmp_path):
    """Sequences that lose their blocks and windows are recomputed, and nobody can tell."""
    wanted = [draw(length) for length in (120, 121, 122, 123)]
    expected = expected_tokens(model_dir, wanted, dtype="fp32", at_once=4, max_tokens=60, **ALONE)
    async with Suite.running(tmp_path, model=model_dir, dtype="fp32", env=SHORT_POOL) as suite:
        assert expected == await tokens_of(suite, wanted, at_once=4, max_tokens=60)
        assert 0 < sum(load.num_preemptions for load in await suite.decode_loads())
