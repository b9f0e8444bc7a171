"""Which processes make a suite, with which settings, started and stopped in which order?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.local.home import Home

Dtype = Literal["bf16", "fp32", "int8"]

GIB = 1 << 30
# Streams that are still running when the suite is told to stop get this long; a person waits at the keyboard.
DRAIN_SECONDS = 10.0
# After its drain a service closes files and channels.
CLOSE_SECONDS = 3.0
# Who calls is stopped before who is called, so that nobody loses a peer it still needs.
STOP_ORDER: tuple[tuple[str, ...], ...] = (
    ("recipe",),
    ("entrypoint",),
    ("prefill", "decode", "prefill_lb", "decode_lb", "vision"),
    ("kvstore",),
    ("console",),  # the others' last spans
    ("nats",),
)
CONSOLE = "console"
ENGINES = frozenset({"prefill", "decode"})
COMPUTES = ENGINES | {"vision"}
WIRED = frozenset({
    "listen", "metrics_listen", "advertise", "nats_url", "replica", "model", "path", "public_listen", "cluster_key",
    "entrypoint_address", "kvstore_address", "prefill_lb_address", "decode_lb_address", "vision_address",
    "object_store_url",
})  # fmt: skip
# OpenMP workers that spin while they wait starve the other engine's. Two busy engines of two threads each on two cores
# (a shared machine, so roughly): 84 tokens/s of decode without spinning, 67 with 1,000 spins, 33 with 5,000, 5 by
# default. Never spinning halves a lone engine's speed, for a step has hundreds of waits; 1,000 spins bridge most.
BRIEF_SPINS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


class Options(BaseModel):
    """What the caller of `fathom up` chose."""

    model_config = ConfigDict(frozen=True)

    model: Path
    dtype: Dtype = "bf16"
    num_prefill: int = 1
    num_decode: int = 1
    num_kvstore: int = 1
    port: int = 8000
    kv_bytes: int = 8 * GIB
    """Cap of the KV store on disk, all replicas together."""
    kv_url: str = ""
    """Object store behind the KV store: s3://BUCKET/PREFIX or file:///FOLDER; empty for none."""
    otlp_endpoint: str = ""
    """Another collector of spans; empty for none."""
    console: bool = True
    """Whether spans are collected here, and shown."""
    settings: tuple[tuple[str, str, str], ...] = ()
    """Further settings as (service, field, value); all replicas of a service get the same."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engines may use here."""

    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to start."""

    name: str
    """The replica's, unique in the suite: "prefill-0"."""
    service: str
    command: tuple[str, ...]
    address: str
    metrics_address: str
    """Serves /healthz; empty for NATS, which is asked on its client port. The console's page is there too."""
    settings: Mapping[str, str]
    """Field name -> value, of the service's own settings."""
    extra: Mapping[str, str]
    """Environment variables of libraries, set as they are."""


def thread_plan(cores: int, num_prefill: int, num_decode: int) -> int:
    """Return torch threads of every engine: the cores shared out, at least one each.

    One number for prefill and decode: where fp32 sums differ by thread count, so would their fingerprints, and neither
    could use the other's blocks. Shared out and not oversubscribed: on two cores, two threads each computed a lone
    prompt 1.4 times faster than one each, but everything slower once both engines were busy.
    """
    return max(1, cores // (num_prefill + num_decode))


def pool_bytes(memory_bytes: int, num_engines: int) -> int:
    """Return the KV pool of one engine: at most 1 GiB, and all pools together at most a quarter of the memory."""
    return min(GIB, memory_bytes // (4 * num_engines))


def plan_suite(
    options: Options,
    home: Home,
    machine: Machine,
    ports: Iterator[int],
    *,
    python: str,
    nats_server: str,
    cluster_key: str,
) -> tuple[ProcessPlan, ...]:
    """Return every process, NATS first; the others may start together, since each waits for its peers by itself.

    Last is the console, if there is one: it is not one of the services, and nobody waits for it.
    """
    nats_port = next(ports)
    addresses = {name: f"127.0.0.1:{next(ports)}" for name, _ in _replicas(options)}
    wiring = _wiring(options, addresses, cluster_key)
    defaults = _defaults(options, home, machine)
    spans_address = f"127.0.0.1:{next(ports)}" if options.console else ""

    plans = [_nats(nats_server, nats_port, home)]
    for name, service in _replicas(options):
        metrics_address = f"127.0.0.1:{next(ports)}"
        chosen = {field: value for owner, field, value in options.settings if owner == service}
        own = {
            "listen": addresses[name],
            "metrics_listen": metrics_address,
            "nats_url": f"nats://127.0.0.1:{nats_port}",
            "replica": name,
        }
        if service == "kvstore":
            own["path"] = str(home.kv_of(name))
        plans.append(
            ProcessPlan(
                name=name,
                service=service,
                # -P: a folder named `services` in the caller's directory must not be taken for ours.
                command=(python, "-P", "-m", f"services.{service}"),
                address=addresses[name],
                metrics_address=metrics_address,
                settings=defaults.get(service, {})
                | _for_all(options, spans_address)
                | chosen
                | wiring.get(service, {})
                | own,
                extra=BRIEF_SPINS if service in COMPUTES else {},
            )
        )
    if options.console:
        plans.append(_console(options, home, python, spans_address, f"127.0.0.1:{next(ports)}"))
    return tuple(plans)


def stop_waves(plans: tuple[ProcessPlan, ...]) -> Iterator[list[str]]:
    """Yield the names to stop together, wave after wave."""
    for services in STOP_ORDER:
        yield [plan.name for plan in plans if plan.service in services]


def _replicas(options: Options) -> Iterator[tuple[str, str]]:
    """Yield (name, service) in the order in which they start."""
    counts = {"prefill": options.num_prefill, "decode": options.num_decode, "kvstore": options.num_kvstore}
    for service in ("kvstore", "vision", "prefill_lb", "decode_lb", "prefill", "decode", "entrypoint", "recipe"):
        yield from ((f"{service}-{index}", service) for index in range(counts.get(service, 1)))


def _for_all(options: Options, spans_address: str) -> dict[str, str]:
    """Return what all are told. Spans go to our console, which passes them on to the other collector, if any."""
    endpoint = f"http://{spans_address}" if spans_address else options.otlp_endpoint
    return {"drain_seconds": str(DRAIN_SECONDS), "otlp_endpoint": endpoint}


def _defaults(options: Options, home: Home, machine: Machine) -> dict[str, dict[str, str]]:
    threads = str(thread_plan(machine.cores, options.num_prefill, options.num_decode))
    pool = str(pool_bytes(machine.memory_bytes, options.num_prefill + options.num_decode))
    engine = {"dtype": options.dtype, "kv_bytes": pool, "threads": threads}
    return {
        "recipe": {"state_url": f"sqlite:///{home.root / 'responses.sqlite3'}"},
        "kvstore": {"max_bytes": str(options.kv_bytes // options.num_kvstore)},
        # Vision works while a prompt waits for it, so it may take as many cores as an engine.
        "vision": {"dtype": options.dtype, "threads": threads},
        "prefill": engine,
        "decode": engine,
    }


def _wiring(options: Options, addresses: Mapping[str, str], cluster_key: str) -> dict[str, dict[str, str]]:
    model = str(options.model)
    stores = _stores(options, addresses)
    engine = {"model": model, "kvstore_address": stores}
    return {
        "recipe": {
            "model": model,
            "entrypoint_address": addresses["entrypoint-0"],
            "public_listen": f"127.0.0.1:{options.port}",
        },
        "entrypoint": {
            "kvstore_address": stores,
            "prefill_lb_address": addresses["prefill_lb-0"],
            "decode_lb_address": addresses["decode_lb-0"],
            "vision_address": addresses["vision-0"],
            "cluster_key": cluster_key,
        },
        "kvstore": {"object_store_url": options.kv_url} if options.kv_url else {},
        "vision": {"model": model},
        "prefill": engine,
        "decode": engine,
    }


def _stores(options: Options, addresses: Mapping[str, str]) -> str:
    """Return what everybody is told of the KV store. Ports change from start to start; names place the blocks."""
    names = [f"kvstore-{index}" for index in range(options.num_kvstore)]
    return addresses[names[0]] if len(names) == 1 else ",".join(f"{name}={addresses[name]}" for name in names)


def _nats(nats_server: str, port: int, home: Home) -> ProcessPlan:
    command = (nats_server, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", str(home.nats))
    return ProcessPlan("nats-0", "nats", command, f"127.0.0.1:{port}", "", {}, {})


def _console(options: Options, home: Home, python: str, spans_address: str, page_address: str) -> ProcessPlan:
    command = (python, "-P", "-m", "services.local.console", str(home.root.parent), spans_address, page_address)
    return ProcessPlan(
        CONSOLE, CONSOLE, (*command, options.otlp_endpoint), spans_address, page_address, settings={}, extra={}
    )
