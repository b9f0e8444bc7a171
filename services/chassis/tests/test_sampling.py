"""Are few requests all traced, and many not?"""

from services.chassis.sampling import A_SECOND, AT_ONCE, FewASecond


def num_sampled(sampler: FewASecond, num_requests: int) -> int:
    return sum(sampler.should_sample(None, 1, "chat").decision.is_sampled() for _ in range(num_requests))


def test_few_requests_are_all_traced_and_of_many_some() -> None:
    """A burst gets AT_ONCE traces, and later as many as the time allows; never more than AT_ONCE at once again."""
    now = 0.0
    sampler = FewASecond(clock=lambda: now)

    assert AT_ONCE == num_sampled(sampler, 100)
    now = 1.0
    assert A_SECOND == num_sampled(sampler, 100)
    now = 1000.0
    assert AT_ONCE == num_sampled(sampler, 100)


def test_a_person_s_requests_are_all_traced() -> None:
    """One every quarter of a second, for as long as they like."""
    now = 0.0
    sampler = FewASecond(clock=lambda: now)

    for _ in range(1000):
        now += 0.25
        assert 1 == num_sampled(sampler, 1)
