"""A profiler sees named ranges when it is there, and nothing is made for it when it is not."""

from torch.profiler import ProfilerActivity, profile

from kernels.ops.ranges import grouped, named, profiled


def test_nobody_looks_so_nothing_is_made() -> None:
    """The same object every time, and items as they are."""
    assert named("a step") is named("another")
    assert [1, 2, 3] == list(grouped([1, 2, 3], "layers", 2))


def test_a_profiler_sees_steps_and_groups_of_layers() -> None:
    """Torch's own here; NVTX has the same ranges on a GPU."""
    with profile(activities=[ProfilerActivity.CPU]) as seen, profiled(), named("decode step"):
        assert list(range(5)) == list(grouped(range(5), "layers", 2))

    assert {"decode step", "layers 0..1", "layers 2..3", "layers 4..4"} <= {each.key for each in seen.key_averages()}
    assert named("a step") is named("another")
