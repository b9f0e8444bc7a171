"""An entrypoint under test among its scripted peers, with a recipe's stream to it."""

import asyncio
import contextlib
import time
from typing import Any

from prometheus_client import CollectorRegistry

from proto.common_pb2 import Cancel, Heartbeat, Request, SamplingParams, StopRules, TokenFrame
from proto.entrypoint_pb2 import GenerateCommand
from proto.entrypoint_pb2_grpc import EntrypointStub, add_EntrypointServicer_to_server
from services.chassis.channel import open_channel
from services.chassis.errors import from_stream_error
from services.chassis.registry import REPLICA_STATE_READY, Replica, ReplicaTable
from services.chassis.streams import PeerStream
from services.chassis.testing import free_port, serve
from services.entrypoint import fleet
from services.entrypoint.config import EntrypointSettings
from services.entrypoint.metrics import EntrypointMetrics
from services.entrypoint.peers import Peers
from services.entrypoint.requests import Requests
from services.entrypoint.server import Entrypoint
from services.entrypoint.tests.doubles import (
    CARD,
    DecodeDouble,
    DecodeLbDouble,
    KvstoreDouble,
    PrefillDouble,
    PrefillLbDouble,
    Stops,
    VisionDouble,
)

CLUSTER_KEY = bytes(range(32))
PROMPT = list(range(1, 50))


async def eventually(promise, seconds=30.0):
    """Poll until `promise()` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not promise():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


class FixedTable(ReplicaTable):
    """A replica table whose content a test sets."""

    def __init__(self, replicas):
        super().__init__("", time.monotonic)
        self.replicas = replicas

    def snapshot(self):
        return tuple(self.replicas)


def replica(service, name, **changes):
    known = {
        "service": service, "replica": name, "boot_id": f"boot-{name}", "address": "127.0.0.1:1", "model": CARD,
        "state": REPLICA_STATE_READY, "total_blocks": 100, "tiers": (), "version": "0", "ep_group": "", "seen": 0.0,
    }  # fmt: skip
    return Replica(**{**known, **changes})


def _events(frame):
    return [(event.request_id, event) for event in frame.events]


class World:
    """Two prefill and two decode replicas, both balancers, the store, one entrypoint, one recipe."""

    def __init__(self, *, num_prefill=2, num_decode=2, has_kvstore=True, has_vision=True, max_requests=256, card=CARD):
        self.log: list[str] = []
        self.stops = Stops(self.log)
        self.kvstore = KvstoreDouble(self.stops)  # type: ignore[abstract]  # serves only what is called
        self.vision = VisionDouble(self.stops)  # type: ignore[abstract]  # as above
        self.prefill_lb = PrefillLbDouble("prefill", self.stops)
        self.decode_lb = DecodeLbDouble("decode", self.stops)
        self.decodes = {
            f"decode-{n}": DecodeDouble(f"decode-{n}", self.stops)  # type: ignore[abstract]  # as above
            for n in range(num_decode)
        }
        self.prefills = {
            f"prefill-{n}": PrefillDouble(f"prefill-{n}", self.stops, self.decodes)  # type: ignore[abstract]  # as above
            for n in range(num_prefill)
        }
        self.table_prefill = FixedTable([replica("prefill", name, model=card) for name in self.prefills])
        self.table_decode = FixedTable([replica("decode", name, model=card) for name in self.decodes])
        self._has_kvstore, self._has_vision = has_kvstore, has_vision
        self._max_requests = max_requests
        self._servers = {}
        self._stack = contextlib.AsyncExitStack()
        self._num_requests = 0

    async def __aenter__(self):
        singles: dict[str, Any] = {
            "kvstore": self.kvstore, "vision": self.vision, "prefill_lb": self.prefill_lb, "decode_lb": self.decode_lb,
        }  # fmt: skip
        for name, double in {**singles, **self.prefills, **self.decodes}.items():
            self._servers[name] = contextlib.AsyncExitStack()
            self._stack.push_async_exit(self._servers[name])
            double.address = await self._servers[name].enter_async_context(serve(double.add))
        self.prefill_lb.replicas = [(n, d.address, f"boot-{n}") for n, d in self.prefills.items()]
        self.decode_lb.replicas = [(n, d.address, f"boot-{n}") for n, d in self.decodes.items()]
        await self._start_entrypoint()
        await self.connect()
        return self

    async def _start_entrypoint(self):
        settings = EntrypointSettings(
            kvstore_address=self.kvstore.address if self._has_kvstore else f"127.0.0.1:{free_port()}",
            vision_address=self.vision.address if self._has_vision else "",
            prefill_lb_address=self.prefill_lb.address,
            decode_lb_address=self.decode_lb.address,
            cluster_key=CLUSTER_KEY.hex(),
            max_requests=self._max_requests,
        )
        channels = {}

        def channel(address):
            if address not in channels:
                channels[address] = open_channel(address)
            return channels[address]

        self.metrics = CollectorRegistry()
        metrics = EntrypointMetrics(self.metrics)
        self.peers = Peers(settings, channel, metrics, boot_id="entrypoint-boot")
        self.requests = Requests(settings, self.peers, metrics, self._choose)
        self.entrypoint = Entrypoint(self.requests, self.table_prefill, self.table_decode)
        self.address = await self._stack.enter_async_context(
            serve(lambda server: add_EntrypointServicer_to_server(self.entrypoint, server))
        )
        self._stack.push_async_callback(self._close, channels)

    async def _close(self, channels):
        await self.recipe.close()
        await self.recipe_channel.close()
        await self.peers.close()
        for channel in channels.values():
            await channel.close()

    def _choose(self, model):
        return fleet.choose(model, self.table_prefill.snapshot(), self.table_decode.snapshot())

    async def __aexit__(self, *exc):
        await self._stack.__aexit__(*exc)

    async def connect(self):
        """Open a recipe's stream; the next requests go there."""
        self.recipe_channel = open_channel(self.address)
        self.stub = EntrypointStub(self.recipe_channel)
        self.recipe: PeerStream[GenerateCommand, TokenFrame] = PeerStream(
            self.stub.Generate,
            lambda: GenerateCommand(heartbeat=Heartbeat(boot_id="recipe")),
            _events,
            "entrypoint",
        )

    async def crash(self, name):
        """End a peer: its streams break, its port refuses."""
        await self._servers.pop(name).aclose()

    def request(self, **changes):
        self._num_requests += 1
        given = {
            "request_id": f"request-{self._num_requests}",
            "model": "tiny",
            "prompt_token_ids": PROMPT,
            "sampling": SamplingParams(seed=7),
            "stop": StopRules(max_tokens=4),
        }
        return Request(**{**given, **changes})

    async def submit(self, request=None, **changes):
        request = request or self.request(**changes)
        subscription = await self.recipe.open_request(request.request_id)
        await self.recipe.send(GenerateCommand(submit=request))
        return Call(self, request, subscription)

    async def ask(self, request=None, **changes):
        """Submit and wait for the last event; return the call."""
        call = await self.submit(request, **changes)
        await call.end()
        return call

    async def settled(self):
        """Wait until nothing is booked or running any more."""
        await eventually(lambda: not (self.prefill_lb.booked or self.decode_lb.booked or len(self.requests)))

    async def prefill_ended(self):
        """Wait until the entrypoint has taken prefill's last word in, or its loss."""
        await eventually(lambda: not any(task.get_name().startswith("prefill.run") for task in asyncio.all_tasks()))

    def cancelled(self):
        """Names of the replicas that were told to cancel."""
        return sorted(n for n, double in {**self.prefills, **self.decodes}.items() if double.cancelled)

    def reasons(self):
        """Why they were."""
        doubles = [*self.prefills.values(), *self.decodes.values()]
        return {reason for double in doubles for reason in double.cancelled}

    def metric(self, name, **labels):
        return self.metrics.get_sample_value(name, labels) or 0.0


class Call:
    """One request as its recipe sees it."""

    def __init__(self, world, request, subscription):
        self.world = world
        self.request = request
        self.events = []
        self._subscription = subscription

    async def next(self, seconds=30.0):
        async with asyncio.timeout(seconds):
            event = await anext(self._subscription)
        self.events.append(event)
        return event

    async def end(self, seconds=30.0):
        """Collect events up to the last one and return it."""
        while not (await self.next(seconds)).finish_reason:
            pass
        self._subscription.close()
        return self.events[-1]

    async def receive(self, count):
        """Collect events until `count` tokens have come."""
        while len(self.tokens) < count:
            assert not (await self.next()).finish_reason, self.events[-1]

    async def cancel(self):
        await self.world.recipe.send(
            GenerateCommand(cancel=Cancel(request_id=self.request.request_id, reason="stop_string"))
        )

    @property
    def tokens(self):
        return [token for event in self.events for token in event.token_ids]

    @property
    def usage(self):
        usage = self.events[-1].usage
        return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens

    @property
    def error(self):
        return from_stream_error(self.events[-1].error)
