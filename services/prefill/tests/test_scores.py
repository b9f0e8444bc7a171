"""Are the logprobs of a prompt's own tokens exact, whatever else the replica does?"""

import asyncio
from pathlib import Path

import pytest

from kernels.batch import Batch, Row
from kernels.tests.shallow_v41 import shallow_v41
from proto.common_pb2 import PositionLogprobs, SamplingParams
from services.chassis.errors import InvalidRequest
from services.prefill.admission import MAX_SCORES, Limits, check_request
from services.prefill.scheduler import SCORED_TOKENS, PromptView, next_chunks
from services.prefill.tests.rig import BLOCK, Rig, prefill_replica, request
from services.prefill.tests.tiny_model import VOCAB


def expected(rig: Rig, token_ids: list[int], num_top: int) -> list[tuple[int, float]]:
    """Each token and its logprob by one forward of the whole prompt, alone."""
    executor = rig.source.executor
    window = min(1, executor.num_windows)
    executor.reset_window(window)
    table = range(1, 2 + len(token_ids) // BLOCK)
    row = Row(0, token_ids, 0, table, window=window, targets=token_ids[1:], num_target_logprobs=num_top)
    return [(each.token_id, each.logprob) for each in executor.score(executor.launch(Batch((row,))))[0]]


def told(positions: list[PositionLogprobs]) -> list[tuple[int, float]]:
    return [(position.chosen.token_id, position.chosen.logprob) for position in positions]


async def test_every_prompt_token_has_its_logprob(folder: Path) -> None:
    """In chunks and beside others; a stored prefix is not used, and one-token answers end here."""
    async with prefill_replica(folder) as rig:
        wanted = request("scored", 100, max_tokens=1, num_prompt_logprobs=2)
        before = await rig.serve(request("scored", 100))
        again = request("scored", 100, max_tokens=1, num_prompt_logprobs=2)
        again.request_id = "again"
        found = await asyncio.gather(rig.serve(wanted), rig.serve(again), rig.serve(request("plain", 90)))
        first, second = (events[-1].first_token for events in found[:2])
        truth = expected(rig, list(wanted.prompt_token_ids), 2)
        await rig.idle()

        assert [token for token, _ in truth] == [token for token, _ in told(list(first.prompt_logprobs))]
        assert [logprob for _, logprob in truth] == pytest.approx(
            [logprob for _, logprob in told(list(first.prompt_logprobs))], abs=1e-6
        )
        assert {2} == {len(position.top) for position in first.prompt_logprobs}
        assert list(first.prompt_logprobs) == list(second.prompt_logprobs)
        assert (0, 100) == (second.cached_tokens, second.computed_tokens)
        sampled = next(event.first_token.token for event in before if event.HasField("first_token"))
        assert list(sampled.token_ids) == list(first.token.token_ids)
        assert not any(event.first_token.prompt_logprobs for event in before)


@pytest.mark.slow
async def test_windows_change_nothing() -> None:
    """A model with sliding windows, twice: the second time its states are there, and not used."""
    async with prefill_replica(shallow_v41(), chunk_tokens=20) as rig:
        wanted = request("scored", 50, max_tokens=1, num_prompt_logprobs=1)
        first, again = [(await rig.serve(wanted))[-1].first_token for _time in range(2)]
        truth = expected(rig, list(wanted.prompt_token_ids), 1)

    assert [logprob for _, logprob in truth] == pytest.approx(
        [logprob for _, logprob in told(list(first.prompt_logprobs))], abs=1e-6
    )
    assert (list(first.prompt_logprobs), 0) == (list(again.prompt_logprobs), again.cached_tokens)


async def test_one_token_has_nothing_before_it(folder: Path) -> None:
    """Its prompt has no logprobs, and that is no error."""
    async with prefill_replica(folder) as rig:
        events = await rig.serve(request("one", 1, max_tokens=1, num_prompt_logprobs=0))

        assert [] == list(events[-1].first_token.prompt_logprobs)


LIMITS = Limits(fingerprint=b"f" * 32, vocab_tokens=VOCAB, context_tokens=1 << 20, block_tokens=BLOCK, block_bytes=1)


@pytest.mark.parametrize(
    ("num_tokens", "asked", "scores", "fits"),
    [
        (100, 20, True, True),
        (100, 21, True, False),
        (MAX_SCORES // 6, 5, True, True),
        (MAX_SCORES // 6 + 1, 5, True, False),
        (100, 0, False, False),
    ],
)
def test_what_would_be_too_much_or_not_exact_is_refused(num_tokens: int, asked: int, scores: bool, fits: bool) -> None:
    """More than 20 alternatives, a reply that no message holds, and replicas that replay windows."""
    limits = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"scores_prompts": scores})
    wanted = request(
        "x", num_tokens, num_prompt_logprobs=asked, sampling=SamplingParams(temperature=1), fingerprint=b"f" * 32
    )
    if fits:
        check_request(wanted, limits)
    else:
        with pytest.raises(InvalidRequest):
            check_request(wanted, limits)


def test_scored_tokens_of_a_step_are_few() -> None:
    """Their logits are all in memory at once; other prompts use what is left of the step."""

    def view(sequence: int, *, is_scored: bool) -> PromptView:
        return PromptView(sequence, 0, sequence, 1000, 0, is_scored=is_scored)

    chunks = next_chunks(
        [view(1, is_scored=True), view(2, is_scored=True), view(3, is_scored=False)], chunk_tokens=1024
    )

    assert [(1, SCORED_TOKENS), (3, 1024 - SCORED_TOKENS)] == [(chunk.sequence, chunk.num_tokens) for chunk in chunks]
