"""What do all tests of the library share? One torch thread, whatever a test before left behind."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two test workers with two threads each would wait for each other on two cores."""
    torch.set_num_threads(1)
