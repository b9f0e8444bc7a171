"""A prefill replica that holds room, pushes half of what it promised, and waits to be killed.

`python -m services.decode.tests.pushing_peer ADDRESS RESERVATION`, the latter a ReserveRequest in hex.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from proto.decode_pb2 import PushChunk, ReserveRequest
from proto.decode_pb2_grpc import DecodeStub, IntakeStub
from services.chassis.channel import open_channel
from services.chassis.handoff import PeerStaging, block_crc32


def say_pushed() -> None:
    sys.stdout.write("pushed\n")
    sys.stdout.flush()


async def main(address: str, ask: ReserveRequest) -> None:
    async with open_channel(address, peer="decode") as channel:
        call: Any = IntakeStub(channel).Hold(ask, timeout=60)
        reply = (await call.read()).reserved
        if reply.shm_path:
            num_blocks = len(ask.block_keys) + 1 - reply.present_blocks
            size = int(sys.argv[3])
            area = PeerStaging(reply.shm_path, nonce=reply.ticket.nonce, num_blocks=num_blocks, block_bytes=size)
            area.block(0)[:] = bytes(size)
            say_pushed()
            await asyncio.sleep(60)

        async def chunks() -> AsyncIterator[PushChunk]:
            data = bytes(64)
            yield PushChunk(ticket=reply.ticket, data=data, crc32=block_crc32(data))
            say_pushed()
            await asyncio.sleep(60)

        await DecodeStub(channel).Push(chunks(), timeout=60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], ReserveRequest.FromString(bytes.fromhex(sys.argv[2]))))
