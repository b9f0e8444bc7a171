"""What stands before several recipes in tests? The plainest HTTP balancer: every connection's requests go round."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle


@asynccontextmanager
async def round_robin(urls: Sequence[str]) -> AsyncIterator[tuple[str, list[str]]]:
    """Run it; yield its address, and where each connection went. Clients must not keep connections open."""
    backends, went = cycle(urls), []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side is gone, so the other one goes
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = next(backends)
        went.append(url)
        host, port = url.removeprefix("http://").split(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, there_writer), carry(there_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", went
    finally:
        server.close()
