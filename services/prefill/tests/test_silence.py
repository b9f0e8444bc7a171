"""Is a silent decode replica noticed?"""

import asyncio
import time

import pytest

from proto.prefill_pb2 import PrefillDeliver
from services.chassis.errors import PeerLost
from services.prefill import handoff as subject
from services.prefill.handoff import Cargo, Handoff, aborts_said
from services.prefill.tests.rig import BOOT, prefill_replica, until

CARGO = Cargo("other", b"f" * 32, [], kv_tokens=5, num_blocks=1, block_bytes=100, window_bytes=0)


async def test_a_decode_that_says_nothing_any_more_is_a_lost_peer(folder, monkeypatch):
    """Its connection stands, and yet the handoff ends long before its deadline."""
    monkeypatch.setattr(subject, "HOLD_SILENCE_SECONDS", 0.1)
    async with prefill_replica(folder) as rig:
        handoff = Handoff(rig.channel(), PrefillDeliver(boot_id=BOOT), CARGO, deadline_unix_seconds=time.time() + 30)
        await until(lambda: rig.decode.held)
        with pytest.raises(PeerLost, match="has said nothing"):
            await asyncio.wait_for(asyncio.shield(handoff._holding), 20)
        handoff.abandon("test")
        await aborts_said()
