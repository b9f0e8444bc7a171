"""A decode replica that makes room, never finishes a handoff, and waits to be killed. Says its address."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from proto.common_pb2 import Ticket
from proto.decode_pb2 import HoldReply, PushReply, ReserveReply
from proto.decode_pb2_grpc import (
    DecodeServicer,
    IntakeServicer,
    add_DecodeServicer_to_server,
    add_IntakeServicer_to_server,
)
from services.chassis.testing import serve


class Dying(DecodeServicer, IntakeServicer):
    async def Hold(self, request: Any, context: Any) -> AsyncIterator[HoldReply]:
        yield HoldReply(reserved=ReserveReply(ticket=Ticket(epoch=1, nonce=bytes(16))))
        while True:
            await asyncio.sleep(0.5)
            yield HoldReply()

    async def Push(self, request_iterator: Any, context: Any) -> PushReply:
        await anext(aiter(request_iterator))
        say("pushing")
        await asyncio.sleep(60)
        return PushReply()


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def main() -> None:
    dying: Any = Dying
    servicer = dying()
    async with serve(
        lambda server: add_DecodeServicer_to_server(servicer, server),
        lambda server: add_IntakeServicer_to_server(servicer, server),
    ) as address:
        say(address)
        await asyncio.sleep(120)


if __name__ == "__main__":
    asyncio.run(main())
