"""What does every gRPC server of the house do alike: limits, health, reflection, errors, spans, metrics?"""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry, Histogram

from services.chassis import errors, names, telemetry
from services.chassis.channel import KEEPALIVE_MILLIS, MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

LIVE = "live"
READY = "ready"
# A client that does not read must not hold its requests' KV forever.
WRITE_SECONDS = 10.0
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLIS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every ten seconds, idle or not; without these two the server hangs up with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server behind the first
)


class HouseServer(aio.Server):
    """A grpc.aio server that applies the house rules to each call and takes servicers also after it was started.

    A service answers health probes from its first moment on and adds its servicers when its model is loaded; until
    `complete` is called, a method nobody added yet is UNAVAILABLE rather than UNIMPLEMENTED.
    """

    def __init__(self, metrics: CollectorRegistry) -> None:
        self._handlers = _Handlers(metrics)
        self._server = aio.server(handlers=[self._handlers], options=_OPTIONS)
        self._health = health_aio.HealthServicer()
        self._is_ready = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self)

    def complete(self) -> None:
        """Say that all servicers are there, and list them through reflection."""
        reflection_names = (*self._handlers.service_names(), reflection.SERVICE_NAME)
        # grpc's own enable_server_reflection looks for its own Server class, hence the servicer by hand.
        add: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server  # generated without types
        add(reflection.aio.ReflectionServicer(reflection_names), self)
        self._handlers.is_complete = True

    async def set_health(self, *, is_ready: bool) -> None:
        """Set "ready" and "" (which follows it); "live" is SERVING as long as the process answers."""
        ready = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(READY, ready)
        await self._health.set("", ready)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignore: generated code also registers its methods by name, and only those are served."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, "Handler"]) -> None:
        """Serve the methods of a service; generated add_*Servicer_to_server functions call this."""
        self._handlers.add(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        """Bind host:port and return the port; raise OSError when it is taken."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as exc:
            raise OSError(f"cannot listen on {address}") from exc
        return port

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Bind host:port with TLS and return the port."""
        return self._server.add_secure_port(address, server_credentials)

    async def wait_idle(self) -> None:
        """Wait until no call runs; shared streams and probes do not count."""
        await self._handlers.idle.wait()

    async def start(self) -> None:
        """Begin to accept calls; nothing is ready yet."""
        await self.set_health(is_ready=False)
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls at once, give running ones `grace` seconds, then cancel them."""
        await self._server.stop(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - grpc's signature
        """Wait until stopped."""
        return await self._server.wait_for_termination(timeout)


class _Handlers(grpc.GenericRpcHandler):
    """Every method the server knows, each wrapped in the house rules once."""

    def __init__(self, metrics: CollectorRegistry) -> None:
        self.is_complete = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._num_running = 0
        self._methods: dict[str, Handler] = {}
        self._seconds = Histogram(
            "fathom_rpc_server_seconds",
            "Duration of calls served.",
            ["method", "code"],
            registry=metrics,
            buckets=_BUCKETS,
        )

    def add(self, service_name: str, handlers: Mapping[str, "Handler"]) -> None:
        for name, handler in handlers.items():
            method = f"/{service_name}/{name}"
            self._methods[method] = self._wrap(handler, method)

    def service_names(self) -> Sequence[str]:
        return sorted({method.split("/")[1] for method in self._methods})

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        handler = self._methods.get(handler_call_details.method)
        if handler is None and not self.is_complete:
            return grpc.stream_stream_rpc_method_handler(_refuse_early)
        return handler

    def _wrap(self, handler: "Handler", method: str) -> "Handler":
        codecs = handler.request_deserializer, handler.response_serializer
        # Probes are no work, and a shared stream carries many requests whose spans hang on their own traceparents.
        is_request = not (method.startswith("/grpc.") or (handler.request_streaming and handler.response_streaming))
        observe = functools.partial(self._observe, method[1:], _Codes(self._seconds, method[1:]), is_request=is_request)

        if not handler.response_streaming:
            inner: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary

            async def answer(request: Any, context: Any) -> Any:
                return await observe(context, lambda: _once(inner(request, context)))

            if handler.request_streaming:
                return grpc.stream_unary_rpc_method_handler(answer, *codecs)
            return grpc.unary_unary_rpc_method_handler(answer, *codecs)

        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def stream(request: Any, context: Any) -> None:
            await observe(context, lambda: _write_all(inner(request, context), context))

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *codecs)
        return grpc.unary_stream_rpc_method_handler(stream, *codecs)

    async def _observe(
        self, method: str, seconds: "_Codes", context: Any, work: Callable[[], Awaitable[Any]], *, is_request: bool
    ) -> Any:
        traceparent = ""
        for name, value in context.invocation_metadata() or ():
            if name == names.TRACEPARENT:
                traceparent = str(value)
            elif name == names.REQUEST_ID_METADATA:
                telemetry.bind_request(str(value))
        started = time.perf_counter()
        self._count(int(is_request))
        code = grpc.StatusCode.OK.name
        try:
            if not (is_request and telemetry.is_sampled(traceparent)):
                if is_request and traceparent:
                    telemetry.pass_on(traceparent)
                return await work()
            attributes = {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: method}
            with telemetry.span(method, traceparent=traceparent, kind=telemetry.SpanKind.SERVER, **attributes):
                return await work()
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED.name
            raise
        except aio.AbortError:
            code = "ABORTED_BY_HANDLER"
            raise
        except Exception as exc:  # noqa: BLE001 - strangers become INTERNAL with an id; errors.py logs their traceback
            error = errors.as_fathom_error(exc)
            code = error.code.name
            await _abort(context, error)
        finally:
            self._count(-int(is_request))
            seconds[code].observe(time.perf_counter() - started)

    def _count(self, change: int) -> None:
        self._num_running += change
        if self._num_running:
            self.idle.clear()
        else:
            self.idle.set()


class _Codes(dict[str, Histogram]):
    """One method's histogram for each status code that it ended with: finding it by labels costs more than adding."""

    def __init__(self, seconds: Histogram, method: str) -> None:
        super().__init__()
        self._seconds = seconds
        self._method = method

    def __missing__(self, code: str) -> Histogram:
        found = self[code] = self._seconds.labels(self._method, code)
        return found


async def _abort(context: Any, error: errors.FathomError) -> NoReturn:
    trailer = (errors.ERROR_METADATA, errors.to_stream_error(error).SerializeToString())
    await context.abort(error.code, error.message, (trailer,))
    raise AssertionError("abort raises")


async def _refuse_early(_requests: Any, context: Any) -> None:
    await _abort(context, errors.NoReplica("still starting"))


async def _once(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _write_all(result: Any, context: Any) -> None:
    """Send what a streaming handler yields; a handler that is a plain coroutine has written by itself."""
    if inspect.isawaitable(result):
        await result
        return
    async with aclosing(result):
        async for message in result:
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await context.write(message)
            except TimeoutError:
                raise errors.PeerLost(f"client has read nothing for {WRITE_SECONDS:.0f} s") from None
