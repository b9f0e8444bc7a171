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
    if sys.platform != "linux":
        return True  # there are no abstract names, which end with their process and leave no file behind
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0fathom-port-{port}")
    except OSError:
        claim.close()
        return False
    _CLAIMS.append(claim)
    return True


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _HIGHEST
    return first if first > _LOWEST + 1000 else _HIGHEST
