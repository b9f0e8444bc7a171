"""What does an empty call cost with grpc.aio alone? `python -m bench.bare_server` answers GetStats with nothing in it.

The yardstick of calls between services: the same library, process and loopback, none of the house's rules around it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc import aio

from proto.kvstore_pb2 import GetStatsRequest, KvstoreStats


async def serve() -> None:
    """Serve on a free port of loopback, print it, and go on until the process is ended."""

    async def answer(_request: GetStatsRequest, _context: object) -> KvstoreStats:
        return KvstoreStats()

    method: grpc.RpcMethodHandler[GetStatsRequest, KvstoreStats] = grpc.unary_unary_rpc_method_handler(
        answer, GetStatsRequest.FromString, lambda reply: reply.SerializeToString()
    )
    server = aio.server(handlers=[grpc.method_handlers_generic_handler("fathom.v1.Kvstore", {"GetStats": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


@contextmanager
def running() -> Iterator[str]:
    """Run it in a process of its own; yield its address."""
    command = [sys.executable, "-m", "bench.bare_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


if __name__ == "__main__":
    asyncio.run(serve())
