"""Which ports are free?"""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

# Below the range from which the kernel takes the source ports of outgoing connections: a port from that range could be
# taken by a neighbour's connection between the choice and the bind, or while a crashed service restarts.
_LOWEST, _HIGHEST = 18000, 32000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether nothing listens on the port. A connection in TIME_WAIT does not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports() -> Iterator[int]:
    """Yield distinct free ports, without end; raise OSError when none is left."""
    candidates = list(range(_LOWEST, min(_HIGHEST, _first_ephemeral())))
    random.shuffle(candidates)  # two suites that start at once then rarely try the same ones
    yield from (port for port in candidates if is_free(port))
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


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _HIGHEST
    return first if first > _LOWEST + 1000 else _HIGHEST
