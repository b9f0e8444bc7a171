"""Which prompts get how many tokens in the next step?"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.prefill.scheduler import Chunk, PromptView, in_order, next_chunks, step_budget, to_admit


def prompt(sequence, *, remaining=100, needed=0, priority=0, is_loading=False):
    return PromptView(sequence, priority, sequence, remaining, needed, is_loading)


def test_first_come_takes_all_it_can_use():
    """The oldest prompt fills the step; only what it leaves goes to the next."""
    assert [Chunk(1, 100), Chunk(2, 28)] == next_chunks([prompt(2), prompt(1)], chunk_tokens=128)


def test_priority_goes_before_arrival():
    """A higher priority is served first, whenever it came."""
    assert [Chunk(2, 64)] == next_chunks([prompt(1), prompt(2, priority=1)], chunk_tokens=64)


def test_a_loading_prompt_holds_nobody_up():
    """While blocks come from the store, the next prompt computes."""
    assert [Chunk(2, 64)] == next_chunks([prompt(1, is_loading=True), prompt(2)], chunk_tokens=64)


def test_a_long_prompt_is_not_overtaken_for_ever():
    """The first that does not fit stops the line, though a later one would fit."""
    assert [] == to_admit([prompt(1, needed=5), prompt(2, needed=1)], free_blocks=4)


def test_no_chunk_before_its_blocks():
    """A prompt without blocks computes nothing."""
    assert [] == next_chunks([prompt(1, needed=1)], chunk_tokens=64)


def test_a_slow_machine_takes_shorter_steps():
    """A step lasts about a second at most, so that a cancel is obeyed in time; a fast machine takes all it may."""
    assert 512 == step_budget(chunk_tokens=512, tokens_per_second=2000)
    assert 512 == step_budget(chunk_tokens=512, tokens_per_second=0)
    assert 300 == step_budget(chunk_tokens=512, tokens_per_second=300)
    assert 128 == step_budget(chunk_tokens=512, tokens_per_second=5)
    assert 64 == step_budget(chunk_tokens=64, tokens_per_second=5)


prompts = st.lists(
    st.builds(
        PromptView,
        sequence=st.just(0),
        priority=st.integers(-1, 1),
        arrival=st.just(0),
        remaining_tokens=st.integers(0, 300),
        needed_blocks=st.integers(0, 6),
        is_loading=st.booleans(),
    ),
    max_size=8,
).map(lambda views: [replace(view, sequence=n, arrival=n) for n, view in enumerate(views)])


@given(prompts, st.integers(1, 512))
@settings(max_examples=60)
def test_budget_and_order_hold(views, budget):
    """Shares never exceed the budget, and only the last one served is cut short."""
    chunks = next_chunks(views, chunk_tokens=budget)
    by_sequence = {view.sequence: view for view in views}
    able = [v for v in in_order(views) if not v.needed_blocks and not v.is_loading and v.remaining_tokens]

    assert min(budget, sum(v.remaining_tokens for v in able)) == sum(c.num_tokens for c in chunks)
    assert [v.sequence for v in able[: len(chunks)]] == [c.sequence for c in chunks]
    assert all(c.num_tokens == by_sequence[c.sequence].remaining_tokens for c in chunks[:-1])


@given(prompts, st.integers(0, 20))
@settings(max_examples=60)
def test_blocks_are_never_oversubscribed(views, free_blocks):
    """What is admitted fits together, and is the front of the line."""
    admitted = to_admit(views, free_blocks=free_blocks)
    needed = {view.sequence: view.needed_blocks for view in views}
    line = [view.sequence for view in in_order(views) if view.needed_blocks]

    assert sum(needed[sequence] for sequence in admitted) <= free_blocks
    assert line[: len(admitted)] == admitted


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 64), st.integers(6, 9))
@settings(max_examples=40)
def test_everybody_is_served(lengths, budget, total_blocks):
    """No starvation: with blocks given back at the end, every prompt ends, in order of arrival."""
    views = {n: prompt(n, remaining=length, needed=-(-length // 16)) for n, length in enumerate(lengths)}
    held: dict[int, int] = {}
    ended: list[int] = []
    for _ in range(sum(lengths) + len(lengths) + 1):
        for sequence in to_admit(list(views.values()), free_blocks=total_blocks - sum(held.values())):
            held[sequence] = views[sequence].needed_blocks
            views[sequence] = replace(views[sequence], needed_blocks=0)
        for chunk in next_chunks(list(views.values()), chunk_tokens=budget):
            left = views[chunk.sequence].remaining_tokens - chunk.num_tokens
            views[chunk.sequence] = replace(views[chunk.sequence], remaining_tokens=left)
            if left == 0:
                del views[chunk.sequence], held[chunk.sequence]
                ended.append(chunk.sequence)

    assert list(range(len(lengths))) == ended
