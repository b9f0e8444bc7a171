"""Which sequences run in the next step, and who gives up its blocks?"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.scheduler import Plan, SequenceView, Share, blocks_for, has_room, in_order, plan_step

BLOCK = 4


def running(sequence, num_tokens, *, priority=0):
    """A sequence in steady state: all but its newest token computed."""
    return SequenceView(sequence, priority, sequence, num_tokens, num_tokens - 1, blocks_for(num_tokens - 1, BLOCK))


def preempted(sequence, num_tokens, *, priority=0):
    return SequenceView(sequence, priority, sequence, num_tokens, 0, 0)


def plan(sequences, *, free=100, max_batch=8, recompute=16):
    return plan_step(sequences, free_blocks=free, block_tokens=BLOCK, max_batch=max_batch, recompute_tokens=recompute)


def test_steady_state_is_one_token_each():
    """A block is given only where the new token needs one."""
    assert (Share(1, 1, 0), Share(2, 1, 1)) == plan([running(1, 4), running(2, 5)]).shares


def test_youngest_of_the_lowest_priority_is_preempted():
    """The oldest keeps its blocks, and so does whoever has a higher priority."""
    chosen = plan([running(1, 5), running(2, 3), running(3, 3), running(4, 3, priority=1)], free=0)

    assert (3,) == chosen.preempted
    assert [4, 1, 2] == [share.sequence for share in chosen.shares]


def test_a_sequence_that_is_its_own_victim_waits():
    """When the youngest needs a block, nobody older pays for it."""
    assert Plan(preempted=(2,), shares=(Share(1, 1, 0),)) == plan([running(1, 4), running(2, 5)], free=0)


def test_max_batch_holds_the_youngest_back():
    """Beyond the batch sequences keep their blocks and wait."""
    assert [1, 2] == [s.sequence for s in plan([running(n, 3) for n in (3, 2, 1)], max_batch=2).shares]


def test_recompute_is_chunked_beside_decode():
    """A resumed sequence computes at most the budget while the others go on by one."""
    resumed = SequenceView(2, 0, 2, 40, 0, 10)

    assert (Share(1, 1, 0), Share(2, 16, 0)) == plan([running(1, 4), resumed]).shares


def test_resume_leaves_room_to_grow():
    """A sequence returns only if everyone who runs can still grow by a block: else it would be preempted again."""
    assert () == plan([running(1, 4), preempted(2, 8)], free=2).resumed
    assert (2,) == plan([running(1, 4), preempted(2, 8)], free=3).resumed


def test_a_plan_that_preempts_resumes_nobody():
    """Two sequences never trade places in one step."""
    assert () == plan([running(1, 5), running(2, 13), preempted(3, 2)], free=0).resumed


def test_newcomers_leave_room_to_grow():
    """Same margin at the door."""
    assert has_room(3, free_blocks=5, num_holders=2)
    assert not has_room(4, free_blocks=5, num_holders=2)


views = st.lists(
    st.builds(
        lambda num_tokens, priority, share, is_held: (num_tokens, priority, share, is_held),
        st.integers(1, 40),
        st.integers(-1, 1),
        st.floats(0, 0.99),
        st.booleans(),
    ),
    max_size=7,
).map(
    lambda drawn: [
        SequenceView(
            n,
            priority,
            n,
            num_tokens,
            int(num_tokens * share) if is_held else 0,
            blocks_for(num_tokens, BLOCK) if is_held else 0,
        )
        for n, (num_tokens, priority, share, is_held) in enumerate(drawn)
    ]
)


@given(views, st.integers(0, 12), st.integers(1, 5), st.integers(1, 20))
@settings(max_examples=80)
def test_every_plan_is_possible(sequences, free, max_batch, recompute):
    """Blocks are never oversubscribed, the batch and recompute budgets hold, victims are the end of the line."""
    chosen = plan(sequences, free=free, max_batch=max_batch, recompute=recompute)
    by_sequence = {view.sequence: view for view in sequences}
    gained = sum(by_sequence[s].held_blocks for s in chosen.preempted)
    given_out = sum(share.new_blocks for share in chosen.shares)
    given_out += sum(blocks_for(by_sequence[s].num_tokens, BLOCK) for s in chosen.resumed)
    line = [view.sequence for view in in_order([v for v in sequences if v.held_blocks])]

    assert given_out <= free + gained
    assert len(chosen.shares) <= max_batch
    assert (
        sum(share.num_tokens for share in chosen.shares if by_sequence[share.sequence].pending_tokens > 1) <= recompute
    )
    assert all(1 <= share.num_tokens <= by_sequence[share.sequence].pending_tokens for share in chosen.shares)
    assert list(reversed(line))[: len(chosen.preempted)] == list(chosen.preempted)
    assert not set(chosen.preempted) & {share.sequence for share in chosen.shares}


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1)), min_size=1, max_size=6),
    st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_everybody_is_served(requests, max_batch):
    """No starvation and no livelock: in a pool that holds the largest sequence alone, all sequences end."""
    total = max(blocks_for(prompt + answer, BLOCK) for prompt, answer, _ in requests)
    waiting = {
        n: (SequenceView(n, priority, n, prompt + 1, 0, 0), prompt + answer)
        for n, (prompt, answer, priority) in enumerate(requests)
    }
    for _ in range(4000):
        if not waiting:
            break
        free = total - sum(view.held_blocks for view, _ in waiting.values())
        assert free >= 0
        chosen = plan([view for view, _ in waiting.values()], free=free, max_batch=max_batch)
        for sequence in chosen.preempted:
            view, end = waiting[sequence]
            waiting[sequence] = replace(view, computed_tokens=0, held_blocks=0), end
        for sequence in chosen.resumed:
            view, end = waiting[sequence]
            waiting[sequence] = replace(view, held_blocks=blocks_for(view.num_tokens, BLOCK)), end
        for share in chosen.shares:
            view, end = waiting[share.sequence]
            computed = view.computed_tokens + share.num_tokens
            grown = view.num_tokens + (computed == view.num_tokens)
            waiting[share.sequence] = (
                replace(
                    view, num_tokens=grown, computed_tokens=computed, held_blocks=view.held_blocks + share.new_blocks
                ),
                end,
            )
            if grown > end:
                del waiting[share.sequence]

    assert {} == waiting
