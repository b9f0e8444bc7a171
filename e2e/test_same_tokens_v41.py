"""Do the same tokens come out of DeepSeek-V4.1 whichever path they took?

A tiny checkpoint in the real format (window 16, block 16, every mechanism of the large one); its greedy answers are also
those of an independent reference.
"""

import random
import shutil
from pathlib import Path

import pytest

from e2e.client import SEEDED, complete_all
from e2e.one_process import alone, together, with_model
from e2e.paths import MAX_TOKENS, answers_of, ids_of, in_turn, mixed_tokens_of, of_each, tokens_of
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
LENGTHS = (1, 2, 15, 16, 17, 22, 32, 33, 48, 49, 64, 65, 71, 80, 81, 128, 129, 257, 500)
TOKEN_BY_TOKEN = (2, 15, 16, 17, 33)  # a prompt passes through all shorter ones' states on its way
LONG = 128  # the prompts that replicas share most of
NUM_BLOCKS = 200
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
def one_process(model_dir):
    """What one process answers: to every prompt alone, and to some that are computed token by token."""

    def compute(executor):
        chunks = {"chunk_tokens": 1, "at_once": 8, "max_tokens": MAX_TOKENS}
        some = ids_of([p for p in PROMPTS if len(p.token_ids) in TOKEN_BY_TOKEN])
        whole = alone(executor, ids_of(PROMPTS), max_tokens=MAX_TOKENS)
        return whole, together(executor, some, samplings=[SEEDED], **chunks)

    return with_model(model_dir, compute, dtype="fp32", num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module")
def expected(one_process):
    return one_process[0]


def hit_with_state(num_tokens: int) -> int:
    """Whole blocks that leave a window and its reserve to compute: there the last run saved a state."""
    return max(num_tokens - REACH, 0) // BLOCK * BLOCK


def hit_without_state(num_tokens: int) -> int:
    """The same blocks, less the tokens that rebuild the windows exactly."""
    return max(hit_with_state(num_tokens) - EXACT, 0)


def found_by(hit) -> list[Prompt]:
    """The prompts that find something, and the two longest that do not."""
    missing = [p for p in PROMPTS if not hit(len(p.token_ids))]
    return [p for p in PROMPTS if p in missing[-2:] or p not in missing]


def lose_window_states() -> None:
    """What a reboot of the host does."""
    for folder in folders():
        shutil.rmtree(folder, ignore_errors=True)


async def check(suite, expected, wanted, samplings, hit, *, at_once):
    """Tokens are the yardstick's, and so many as `hit` says were found."""
    check_answers(expected, wanted, samplings, hit, await answers_of(suite, wanted, samplings, at_once=at_once))


async def check_anew(suite, expected, hit, meanwhile=lambda: None):
    """As `check`, one after the other, of engines with empty pools. meanwhile: what is done while there are none."""

    async def restart():
        await suite.restart_engines(meanwhile)

    wanted = found_by(hit)
    samplings = [SEEDED] * len(wanted)
    await restart()
    found = await suite.from_stores(lambda: answers_of(suite, wanted, samplings, at_once=1), restart)
    check_answers(expected, wanted, samplings, hit, found)


def check_answers(expected, wanted, samplings, hit, found):
    assert of_each(expected, wanted, samplings) == {p.name: a.token_ids for p, a in zip(wanted, found, strict=True)}
    assert [hit(len(p.token_ids)) for p in wanted] == [a.cached_tokens for a in found]


def test_chunks_and_batch_mates_change_nothing(one_process):
    """One token at a time beside the others' decode steps; chunks of 37 go through services below, with all prompts."""
    whole, chunked = one_process

    assert {f"length-{length}": whole["seeded"][f"length-{length}"] for length in TOKEN_BY_TOKEN} == chunked["seeded"]


async def test_split_batched_and_warm_with_and_without_windows(model_dir, expected, tmp_path):
    """One prefill and one decode: cold with batch mates, warm with the saved windows, warm without them.

    Every prompt is answered once cold and once warm, once greedy and once seeded; then, from the store, those that find
    something, and a few that do not. In each state, three more prompts get an independent reference's greedy tokens.
    """
    names = ("n5", "n17", "n48")
    prompts = [golden(f"seq.{name}.ids").tolist() for name in names]
    reference = [tuple(golden_json(f"greedy/greedy.kvq.{name}")["tokens"]) for name in names]
    cold, warm = in_turn(len(PROMPTS)), in_turn(len(PROMPTS), first=1)
    async with Suite.running(tmp_path, model=model_dir, dtype="fp32") as suite:

        async def greedy():
            found = await complete_all(suite.base_url, prompts, at_once=len(prompts), max_tokens=len(reference[0]))
            return [a.token_ids for a in found]

        assert reference == await greedy()
        await check(suite, expected, PROMPTS, cold, lambda _: 0, at_once=8)
        await check(suite, expected, PROMPTS, warm, hit_with_state, at_once=8)
        assert reference == await greedy()

        await check_anew(suite, expected, hit_with_state)  # blocks from kvstore, windows from the host's memory
        await check_anew(suite, expected, hit_without_state, lose_window_states)
        assert reference == await greedy()


async def test_two_prefill_and_two_decode_replicas_in_odd_chunks(model_dir, expected, tmp_path):
    """Which replica computed what, in which pieces, does not show in the tokens: of cold prompts, and of warm ones."""
    env = {"FATHOM_PREFILL_CHUNK_TOKENS": "37"}
    async with Suite.running(tmp_path, model=model_dir, dtype="fp32", prefill=2, decode=2, env=env) as suite:
        for wanted, first in ((PROMPTS, 0), ([p for p in PROMPTS if len(p.token_ids) >= LONG], 1)):
            each = in_turn(len(wanted), first=first)
            assert of_each(expected, wanted, each) == await mixed_tokens_of(suite, wanted, each, at_once=8)


@pytest.mark.long  # the decode service's tests have the same promise, with replicas in one process
async def test_preempted_sequences_give_the_same_tokens(model_dir, tmp_path):
    """Sequences that lose their blocks and windows are recomputed, and nobody can tell."""
    wanted = [draw(length) for length in (120, 121, 122, 123)]
    expected = with_model(
        model_dir, lambda executor: alone(executor, ids_of(wanted), max_tokens=60), dtype="fp32", num_blocks=NUM_BLOCKS
    )
    async with Suite.running(tmp_path, model=model_dir, dtype="fp32", env=SHORT_POOL) as suite:
        assert expected == await tokens_of(suite, wanted, at_once=4, max_tokens=60)
        assert 0 < sum(load.num_preemptions for load in await suite.decode_loads())
