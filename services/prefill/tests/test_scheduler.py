"""Which prompts get how many tokens in the next step?"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.prefill.scheduler import (
    Chunk,
    PromptView,
    Span,
    in_order,
    next_chunks,
    outside_images,
    step_budget,
    to_admit,
)


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
    assert [] == to_admit([prompt(1, needed=5), prompt(2, needed=1)], free_blocks=4, free_windows=9)


def test_a_chunk_ends_at_the_next_stop():
    """A window state is saved there; what the step has left goes to the next prompt."""
    first = replace(prompt(1), position=30, stops=(16, 30, 48, 64))

    assert [Chunk(1, 18), Chunk(2, 46)] == next_chunks([first, prompt(2)], chunk_tokens=64)


def test_tokens_that_wait_for_embeddings_are_held_back():
    """The text before them is computed; then it is the next prompt's turn."""
    assert [Chunk(1, 40), Chunk(2, 24)] == next_chunks(
        [replace(prompt(1), held_back_tokens=60), prompt(2)], chunk_tokens=64
    )
    assert [Chunk(2, 64)] == next_chunks([replace(prompt(1), held_back_tokens=100), prompt(2)], chunk_tokens=64)


def test_no_chunk_ends_inside_an_image():
    """It ends before the image; the first in line takes the image it begins with whole, whatever the budget."""
    before = replace(prompt(1), images=(Span(20, 90),))
    at = replace(prompt(1, remaining=80), position=20, images=before.images)
    inside = replace(prompt(1, remaining=60), position=40, images=before.images)

    assert [Chunk(1, 20), Chunk(2, 12)] == next_chunks([before, prompt(2)], chunk_tokens=32)
    assert [Chunk(1, 70)] == next_chunks([at, prompt(2)], chunk_tokens=32)
    assert [Chunk(1, 50)] == next_chunks([inside, prompt(2)], chunk_tokens=32)
    assert [Chunk(2, 10)] == next_chunks([at, prompt(2, remaining=10, priority=1)], chunk_tokens=32)
    assert [Chunk(2, 10), Chunk(1, 80)] == next_chunks([at, prompt(2, remaining=10, priority=1)], chunk_tokens=99)


def test_stops_lie_outside_images():
    """A boundary inside an image moves before it, over neighbouring images too, and is none when it reaches 0."""
    images = (Span(4, 12), Span(12, 40), Span(64, 70))

    assert (48, 64) == outside_images((48, 64), images, block_tokens=16)
    assert (64,) == outside_images((64, 68), images, block_tokens=4)
    assert (12,) == outside_images((32,), images, block_tokens=4)
    assert () == outside_images((32,), images, block_tokens=8)
    assert () == outside_images((32, 16), images, block_tokens=16)


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


@given(prompts, st.integers(0, 20), st.integers(0, 4))
@settings(max_examples=60)
def test_blocks_and_windows_are_never_oversubscribed(views, free_blocks, free_windows):
    """What is admitted fits together, and is the front of the line."""
    admitted = to_admit(views, free_blocks=free_blocks, free_windows=free_windows)
    needed = {view.sequence: view.needed_blocks for view in views}
    line = [view.sequence for view in in_order(views) if view.needed_blocks]

    assert sum(needed[sequence] for sequence in admitted) <= free_blocks
    assert len(admitted) <= free_windows
    assert line[: len(admitted)] == admitted


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 64), st.integers(6, 9))
@settings(max_examples=40)
def test_everybody_is_served(lengths, budget, total_blocks):
    """No starvation: with blocks given back at the end, every prompt ends, in order of arrival."""
    views = {n: prompt(n, remaining=length, needed=-(-length // 16)) for n, length in enumerate(lengths)}
    held: dict[int, int] = {}
    ended: list[int] = []
    for _ in range(sum(lengths) + len(lengths) + 1):
        free_blocks = total_blocks - sum(held.values())
        for sequence in to_admit(list(views.values()), free_blocks=free_blocks, free_windows=2 - len(held)):
            held[sequence] = views[sequence].needed_blocks
            views[sequence] = replace(views[sequence], needed_blocks=0)
        for chunk in next_chunks(list(views.values()), chunk_tokens=budget):
            left = views[chunk.sequence].remaining_tokens - chunk.num_tokens
            views[chunk.sequence] = replace(views[chunk.sequence], remaining_tokens=left)
            if left == 0:
                del views[chunk.sequence], held[chunk.sequence]
                ended.append(chunk.sequence)

    assert list(range(len(lengths))) == ended


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=4),
    st.lists(st.integers(1, 8), max_size=3),
    st.integers(1, 40),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_a_prompt_with_images_and_stops_is_computed_whole(gaps, blocks, budget, tail):
    """Chunk by chunk to its end: never across a stop, never ending in an image, over the budget for an image only."""
    spans, end = [], 0
    for gap, length in gaps:
        spans.append(Span(end + gap, end + gap + length))
        end += gap + length
    total = end + tail
    stops = tuple(stop for stop in outside_images([16 * n for n in blocks], spans, block_tokens=16) if stop < total)
    position, ends = 0, set()
    while position < total:
        view = replace(prompt(1, remaining=total - position), position=position, stops=stops, images=tuple(spans))
        (chunk,) = next_chunks([view], chunk_tokens=budget)
        assert chunk.num_tokens <= max([budget, *(span.end - span.start for span in spans)])
        position += chunk.num_tokens
        ends.add(position)

    assert total == position
    assert set(stops) <= ends
    assert not [end for end in ends for span in spans if span.start < end < span.end]
