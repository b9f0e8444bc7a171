"""Which ports are free, and nobody else's?"""

import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

# Below the range from which the kernel takes the source ports of outgoing connections: a port from that range could be
# taken by a neighbour's connection between the choice and the bind, or while a crashed service restarts.
_LOWEST, _HIGHEST = 18000, 32000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CLAIMS: list[socket.socket] = []
"""Held until the process ends, as long as a suite may have to restart a service on the port that it was given."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether nothing listens on the port. A connection in TIME_WAIT does not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(*, taken: int = 0) -> Iterator[int]:
    """Yield distinct free ports, without end; raise OSError when none is left.

    A port stays claimed until this process ends, so no other process is given it here in the seconds before its service
    listens, or while that restarts.  taken: a port that is spoken for although nothing listens on it yet.
    """
    candidates = list(range(_LOWEST, min(_HIGHEST, _first_ephemeral())))
    random.shuffle(candidates)
    yield from (port for port in candidates if port != taken and is_free(port) and _claim(port))
    raise OSError(f"no free port between {_LOWEST} and {_HIGHEST}")


def suite_ports(*, http: int) -> Iterator[int]:
    """Yield free ports for the services of one suite, which no other one is given for HTTP either. http: our own."""
    for port in free_ports(taken=http):
        kept = reserve(port)
        if kept is not None:
            _CLAIMS.append(kept)
            yield port


def reserve(port: int) -> socket.socket | None:
    """Return what keeps a port for one suite until its last holder closes it, or None where another suite has it.

    Not the same claim as that of `free_ports`: whoever chose a port there may start a suite on it.
    """
    return _named(_reservation(port))


def holder_of(port: int) -> str:
    """Return who listens on the port, for an error message; empty when the system does not tell."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
            and connection.pid
        ):
            try:
                return f"{psutil.Process(connection.pid).name()}, pid {connection.pid}"
            except psutil.NoSuchProcess:
                return ""
    return ""


def _claim(port: int) -> bool:
    """Return whether the port is this process's now; it is not where another one, or this one, claimed it before."""
    claim = _named(f"\0fathom-port-{port}")
    if claim is None:
        return False
    # Asked only now that it is ours, and without binding the name even for a moment: its suite may be about to.
    if _is_reserved(port):
        claim.close()
        return False
    _CLAIMS.append(claim)
    return True


def _named(name: str) -> socket.socket | None:
    """Return a socket of that abstract name, or None where there is one."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":
        return claim  # there are no abstract names, which end with their process and leave no file behind
    try:
        claim.bind(name)
    except OSError:
        claim.close()
        return None
    return claim


def _is_reserved(port: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return sys.platform == "linux" and probe.connect_ex(_reservation(port)) == 0


def _reservation(port: int) -> str:
    return f"\0fathom-suite-{port}"


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _HIGHEST
    return first if first > _LOWEST + 1000 else _HIGHEST
