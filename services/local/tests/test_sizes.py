"""Does a person read sizes that say something?"""

import pytest

from services.local.sizes import in_words


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (113_920, "111 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (2_949_120, "2.8 MiB"),
        (8 << 30, "8.0 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_a_size_is_said_in_the_unit_that_fits(num_bytes: int, expected: str) -> None:
    """Nothing that is there is said to be 0.0 MiB."""
    assert expected == in_words(num_bytes)
