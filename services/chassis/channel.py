"""How does one service call another?

`open_channel` returns an ordinary grpc.aio channel for the generated stubs. Calls made through it carry trace context
and request id, need a deadline, raise FathomError instead of AioRpcError, and are retried where that is safe. Shared
streams belong to no request: they carry neither and take no deadline.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Self

import grpc
from grpc import aio

from services.chassis import errors, names, telemetry

MAX_MESSAGE_BYTES = 8 << 20
MAX_CHUNK_BYTES = 2 << 20
KEEPALIVE_MILLIS = 10_000
RETRIES = 2
RETRY_SECONDS = 0.05

# Unary methods that may run twice: they read, or the second run does nothing.
IDEMPOTENT = frozenset(
    {
        "/fathom.v1.Decode/Abort",
        "/fathom.v1.Decode/GetLoad",
        "/fathom.v1.DecodeLb/Pick",  # a request has one booking: the second replaces the first
        "/fathom.v1.DecodeLb/Release",
        "/fathom.v1.Entrypoint/ListModels",
        "/fathom.v1.Kvstore/GetStats",
        "/fathom.v1.Kvstore/Lookup",
        "/fathom.v1.Prefill/GetLoad",
        "/fathom.v1.PrefillLb/Pick",  # the same
        "/fathom.v1.PrefillLb/Release",
        "/grpc.health.v1.Health/Check",
    }
)

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLIS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A replica that restarts is reachable again within a second, not within grpc's default two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # retries are ours: only idempotent calls
    ("grpc.use_local_subchannel_pool", 1),  # one replica's broken connection is no other channel's
)


def open_channel(address: str, *, peer: str = "") -> aio.Channel:
    """Return a channel to `address` (host:port or a gRPC target). `peer` names the other side in errors and logs."""
    return PeerChannel(aio.insecure_channel(address, options=_OPTIONS), peer or address)


class PeerChannel(aio.Channel):
    """A grpc.aio channel that applies the house rules to each call."""

    def __init__(self, channel: aio.Channel, peer: str) -> None:
        self._channel = channel
        self.peer = peer

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable for one request and one reply; `timeout` is required."""
        call = self._channel.unary_unary(method, *args, **kwargs)
        attempts = 1 + (RETRIES if method in IDEMPOTENT else 0)

        def start(request: Any, *, timeout: float | None = None, metadata: Any = None, **rest: Any) -> "UnaryCall":
            _require_deadline(method, timeout)
            context = _metadata(metadata)
            return UnaryCall(
                lambda left: call(request, timeout=left, metadata=context, **rest), timeout, attempts, self.peer
            )

        return start

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable for one request and many replies; `timeout` is required."""
        return self._streaming(self._channel.unary_stream(method, *args, **kwargs), method, is_shared=False)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable for many requests and one reply; `timeout` is required."""
        return self._streaming(self._channel.stream_unary(method, *args, **kwargs), method, is_shared=False)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable for a shared stream: it lives as long as its two ends, so it takes no deadline."""
        return self._streaming(self._channel.stream_stream(method, *args, **kwargs), method, is_shared=True)

    def _streaming(self, call: Callable[..., Any], method: str, *, is_shared: bool) -> Callable[..., "StreamCall"]:
        def start(*args: Any, timeout: float | None = None, metadata: Any = None, **rest: Any) -> "StreamCall":
            if is_shared:  # whichever request opens it, it is every request's: each names itself in its commands
                pairs = tuple(metadata or ())
            else:
                _require_deadline(method, timeout)
                pairs = _metadata(metadata)
            return StreamCall(call(*args, timeout=timeout, metadata=pairs, **rest), self.peer)

        return start

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the connection; calls still running are cancelled after `grace` seconds."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - grpc's signature
        """Return the connection's state."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connection's state is another one."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until connected."""
        await self._channel.channel_ready()


class UnaryCall:
    """A call with one request and one reply; await it for the reply. Starts when awaited."""

    def __init__(self, start: Callable[[float], Any], timeout: float | None, attempts: int, peer: str) -> None:
        assert timeout is not None
        self._start = start
        self._timeout = timeout
        self._attempts = attempts
        self._peer = peer

    def __await__(self) -> Generator[Any, None, Any]:
        return self._run().__await__()

    async def _run(self) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        left = self._timeout
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._start(left)
            except aio.AioRpcError as exc:
                pause = RETRY_SECONDS * attempt * random.uniform(0.5, 1.5)  # noqa: S311 - spreads retries, hides nothing
                left = deadline - loop.time() - pause
                is_last = attempt == self._attempts or left <= 0
                if is_last or exc.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise errors.from_rpc(exc, peer=self._peer) from None
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


class StreamCall:
    """A grpc.aio streaming call whose failures are FathomErrors; otherwise it behaves like the call it wraps."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self.peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._mapped(self._call).__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for message in self._call:
                yield message
        except aio.AioRpcError as exc:
            raise errors.from_rpc(exc, peer=self.peer) from None

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF after the last."""
        return await self._mapped(self._call.read())

    async def write(self, message: Any) -> None:
        """Send one message. One writer at a time; a cancelled write cancels the whole call."""
        await self._mapped(self._call.write(message))

    async def done_writing(self) -> None:
        """Say that no more messages follow."""
        await self._mapped(self._call.done_writing())

    async def wait_for_connection(self) -> None:
        """Wait until the peer has accepted the call."""
        await self._mapped(self._call.wait_for_connection())

    async def _mapped(self, waiting: Any) -> Any:
        try:
            return await waiting
        except aio.AioRpcError as exc:
            raise errors.from_rpc(exc, peer=self.peer) from None
        except asyncio.InvalidStateError:
            # write() on a call that has ended: its status says why.
            raise errors.PeerLost(f"{self.peer} ended the stream") from None


def _require_deadline(method: str, timeout: float | None) -> None:
    if timeout is None:
        raise TypeError(f"{method}: pass timeout=; every call to a peer has a deadline")


def _metadata(given: Any) -> tuple[tuple[str, str | bytes], ...]:
    pairs = list(given or ())
    traceparent, request_id = telemetry.current_traceparent(), telemetry.request_id()
    if traceparent:
        pairs.append((names.TRACEPARENT, traceparent))
    if request_id:
        pairs.append((names.REQUEST_ID_METADATA, request_id))
    return tuple(pairs)
