"""A suite's ports are its own from the moment they are chosen."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.local import ports
from services.local.ports import free_ports, reserve, suite_ports

TRIED = 8
CLAIM = """
import sys
from services.local import ports
ports._LOWEST, ports._HIGHEST = int(sys.argv[1]), int(sys.argv[1]) + 1
print(next(ports.free_ports()), flush=True)
sys.stdin.read()  # until it is closed
"""


@pytest.fixture
def few_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Leave eight ports to choose from, and say which of them are free."""
    monkeypatch.setattr(ports, "_HIGHEST", ports._LOWEST + TRIED)
    monkeypatch.setattr(ports, "_CLAIMS", [])
    free = all_of_them()
    release()
    assert len(free) > 1
    yield free
    release()


def all_of_them(*, taken: int = 0) -> list[int]:
    found = []
    with pytest.raises(OSError, match="no free port"):
        for port in free_ports(taken=taken):
            found.append(port)
    return sorted(found)


def release() -> None:
    while ports._CLAIMS:
        ports._CLAIMS.pop().close()


def test_a_port_is_given_once(few_ports: list[int]) -> None:
    """Nothing listens on it yet, and still nobody is given it a second time."""
    assert few_ports == all_of_them()
    assert [] == all_of_them()


def test_the_public_port_is_left_alone(few_ports: list[int]) -> None:
    """What the user named for HTTP goes to no service, though HTTP is served last."""
    assert few_ports[1:] == all_of_them(taken=few_ports[0])


def test_a_port_that_a_suite_was_asked_for_is_given_to_nobody(few_ports: list[int]) -> None:
    """Nothing listens there for as long as its model loads; once the suite has ended, the port is free again."""
    kept = reserve(few_ports[0])
    assert kept is not None
    with kept:
        assert reserve(few_ports[0]) is None
        assert few_ports[1:] == all_of_them()
    release()
    assert few_ports == all_of_them()


def test_no_suite_is_asked_for_a_port_that_another_ones_service_has(few_ports: list[int]) -> None:
    """While that restarts, nobody listens. A port that was only looked for is its finder's, to start a suite on."""
    given, found = next(suite_ports(http=0)), next(free_ports())

    assert given != found
    assert reserve(given) is None
    kept = reserve(found)
    assert kept is not None
    kept.close()


def test_another_process_leaves_what_was_claimed_until_its_owner_ends(few_ports: list[int]) -> None:
    """Two suites that start at once get different ports."""
    command = [sys.executable, "-P", "-c", CLAIM, str(few_ports[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert str(few_ports[0]) == other.stdout.readline().strip()
        assert few_ports[1:] == all_of_them()
        other.communicate(timeout=30)
    release()
    assert few_ports == all_of_them()
