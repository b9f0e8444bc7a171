"""How does an operator look into the KV store, check it and clear it? `fathom kv`."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table

from proto.common_pb2 import RetentionClass
from proto.kvstore_pb2 import (
    BadBlock,
    EvictRequest,
    GetStatsRequest,
    KvstoreStats,
    VerifyRequest,
)
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis import kvstore_pins
from services.chassis.channel import open_channel
from services.chassis.errors import FathomError
from services.chassis.kvstore_shards import parse_replicas
from services.kvstore.directory import CLASSES, StoreLockedError
from services.local import state
from services.local.home import Home
from services.local.sizes import in_words

if TYPE_CHECKING:
    import grpc.aio

    from proto.kvstore_pb2_grpc import KvstoreAsyncStub

EXIT_DAMAGED = 3
"""Of `verify` when a block is not what was written."""
SECONDS = 30.0
LONG_SECONDS = 24 * 3600.0
"""Verifying and evicting take as long as the disk takes."""
MIB = 1 << 20
FINGERPRINT_BYTES = 32
"""Of a key too."""
SHORT_DIGITS = 12
"""How much of a fingerprint is shown, and is enough to name it."""
BREAKER_WORDS = {"closed": "in use", "open": "away"}

app = typer.Typer(help="Look into the KV store, check it, clear it (docs/kvstore_operations.md).", no_args_is_help=True)

Addresses = Annotated[
    list[str] | None,
    typer.Option("--address", help=r"\[name=]host:port of a store; without any, those of this directory."),
]
Tenant = Annotated[str, typer.Option(help="Whose blocks; empty is for requests without keys.")]
Fingerprint = Annotated[str, typer.Option(help="Model fingerprint, 64 hex digits, or as stats shows it.")]
Keys = Annotated[list[str], typer.Argument(help="Block keys, 64 hex digits each, in the order of the prompt.")]
Session = Annotated[str, typer.Argument(help="Names the session that the pins belong to.")]
T = TypeVar("T")


@app.command()
def stats(address: Addresses = None) -> None:
    """Show what each store holds, by class, by model fingerprint and by tenant."""
    console = Console(width=None if sys.stdout.isatty() else 160)

    async def ask(name: str, stub: "KvstoreAsyncStub") -> None:
        reply = await stub.GetStats(GetStatsRequest(), timeout=SECONDS)
        console.print(_summary(name, reply), highlight=False)
        console.print(_uses(reply))

    _with_each(_running(address), ask)


@app.command()
def verify(
    address: Addresses = None,
    path: Annotated[
        list[Path] | None, typer.Option(help="Folder of a stopped store; this directory's when nothing runs here.")
    ] = None,
    mebibytes_per_second: Annotated[int, typer.Option(min=0, help="Most that is read; 0 is without bound.")] = 0,
    remote: Annotated[
        int, typer.Option(min=0, help="MiB of the object store to read back as well; each call begins elsewhere.")
    ] = 0,
) -> None:
    """Read back every block; name the bad ones and exit with status 3 if there are any."""
    rate = mebibytes_per_second * MIB
    addresses = {} if path else _running(address, may_be_none=True)
    if addresses:
        num_bad = sum(_with_each(addresses, partial(_verify_running, rate=rate, remote_bytes=remote * MIB)))
    elif remote:
        _fail("only a running store can read its object store back")
    else:
        num_bad = sum(_verify_stopped(folder, rate) for folder in path or _folders())
    raise typer.Exit(EXIT_DAMAGED if num_bad else 0)


@app.command()
def evict(
    address: Addresses = None,
    tenant: Annotated[str | None, typer.Option(help="Everything of a tenant; its key is destroyed.")] = None,
    is_anonymous: Annotated[  # noqa: FBT002 - typer makes flags of these
        bool, typer.Option("--anonymous", help="Everything of requests without keys.")
    ] = False,
    fingerprint: Fingerprint = "",
    retention: Annotated[str, typer.Option(help="chat or agent.")] = "",
    is_all: Annotated[bool, typer.Option("--all", help="Everything.")] = False,  # noqa: FBT002 - as above
) -> None:
    """Remove what matches all that is named; return once the bytes are gone from the disk."""
    if retention not in {"", *CLASSES[1:]}:
        _fail(f"{retention!r} is no class; there are {', '.join(CLASSES[1:])}")
    is_narrow = tenant is not None or is_anonymous or bool(fingerprint) or bool(retention)
    if is_all == is_narrow:
        _fail("name what to remove with --tenant, --anonymous, --fingerprint, --retention, or with --all alone")
    addresses = _running(address)
    request = EvictRequest(
        tenant=tenant or "",
        is_tenant_set=tenant is not None or is_anonymous,
        fingerprint=_fingerprint(fingerprint, addresses) if fingerprint else b"",
        retention=cast("RetentionClass.ValueType", CLASSES.index(retention) if retention else 0),
        is_all=is_all,
    )

    async def ask(name: str, stub: "KvstoreAsyncStub") -> None:
        reply = await stub.Evict(request, timeout=LONG_SECONDS)
        removed = f"{_counted(reply.num_blocks, 'block')}, {in_words(reply.num_bytes)}"
        print(f"{name}: removed {removed} (a copy in an object store counts like one on disk)")

    _with_each(addresses, ask)


@app.command()
def pin(
    session: Session,
    keys: Keys,
    fingerprint: Fingerprint,
    tenant: Tenant = "",
    seconds: Annotated[float, typer.Option(min=0, help="How long; 0 is the store's default.")] = 0,
    address: Addresses = None,
) -> None:
    """Keep all these blocks from eviction for a session, each on the store that it belongs to, or none of them."""
    named = [_hex(key) for key in keys]
    addresses = _running(address)
    wanted = kvstore_pins.Session(session, tenant, _fingerprint(fingerprint, addresses), named, seconds)
    pinned = _with_all(addresses, lambda channels: kvstore_pins.pin(channels, wanted, seconds=SECONDS))
    if pinned.first_missing is not None:
        _fail(f"nothing is pinned: its store does not have, or may not keep, {keys[pinned.first_missing]}")
    print(f"{_counted(pinned.num_pinned, 'block')} pinned")


@app.command()
def release(
    session: Session,
    tenant: Tenant = "",
    keys: Annotated[list[str] | None, typer.Option("--key", help="Only this block; all when left out.")] = None,
    address: Addresses = None,
) -> None:
    """Take a session's pins back."""
    named = [_hex(key) for key in keys or ()]
    num_released = _with_all(
        _running(address),
        lambda channels: kvstore_pins.release(channels, session, tenant, named, seconds=SECONDS),
    )
    print(f"released {_counted(num_released, 'block')}")


async def _verify_running(name: str, stub: "KvstoreAsyncStub", rate: int, remote_bytes: int) -> int:
    num_bad = num_blocks = num_unread = 0
    request = VerifyRequest(max_bytes_per_second=rate, remote_bytes=remote_bytes)
    async for report in stub.Verify(request, timeout=LONG_SECONDS):
        for block in report.bad:
            _print_bad(name, block)
        num_bad += len(report.bad)
        num_blocks, num_unread = report.num_blocks, report.num_unread
    unread = f"; not read: {_counted(num_unread, 'block')} of the object store (--remote MIB)" if num_unread else ""
    print(f"{name}: {_counted(num_blocks, 'block')} read, {num_bad} bad{unread}")
    return num_bad


def _verify_stopped(folder: Path, rate: int) -> int:
    num_bad = num_blocks = 0
    try:
        # Here: it brings in what reads and decrypts blocks, which no other command needs.
        from services.kvstore.verification import verify_folder

        for report in verify_folder(folder, max_bytes_per_second=rate):
            for one in report.bad:
                _print_bad(
                    str(folder),
                    BadBlock(block_key=one.key, segment=one.segment, offset_bytes=one.offset_bytes, fault=one.fault),
                )
            num_bad += len(report.bad)
            num_blocks = report.num_blocks
    except (OSError, StoreLockedError) as reason:
        _fail(str(reason))
    print(f"{folder}: {_counted(num_blocks, 'block')} read, {num_bad} bad")
    return num_bad


def _print_bad(name: str, block: BadBlock) -> None:
    print(f"{name}: bad {block.fault} of block {block.block_key.hex()} in {block.segment} at {block.offset_bytes}")


def _summary(name: str, reply: KvstoreStats) -> str:
    objects = BREAKER_WORDS.get(reply.breaker, reply.breaker or "off")
    return (
        f"{name}: {_counted(reply.num_blocks, 'block')} in {_counted(reply.num_segments, 'segment')}; "
        f"{in_words(reply.physical_bytes)} of {in_words(reply.max_bytes)} of disk; "
        f"{reply.num_pinned} pinned, {_counted(reply.num_leases, 'lease')}; since start {reply.num_evicted} evicted, "
        f"{reply.num_expired} expired, {reply.num_damaged} damaged; object store {objects}"
        + (f" with {_counted(reply.num_remote_blocks, 'block')}" if reply.num_remote_blocks else "")
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _uses(reply: KvstoreStats) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("held by", "blocks", "size", "quota", "days"):
        table.add_column(column, justify="left" if column == "held by" else "right", no_wrap=True)
    for kind in reply.retentions:
        days = f"{kind.seconds / 86_400:g}" if kind.seconds else "until room is needed"
        table.add_row(
            f"class {CLASSES[kind.retention]}" if kind.retention else "no class", str(kind.num_blocks), "", "", days
        )
    for model in reply.fingerprints:
        short = model.fingerprint.hex()[:SHORT_DIGITS]
        table.add_row(f"fingerprint {short}", str(model.num_blocks), in_words(model.num_bytes), "", "")
    for one in reply.tenants:
        quota = in_words(one.quota_bytes) if one.quota_bytes else "-"
        name = f"tenant {one.tenant}" if one.tenant else "requests without keys"
        table.add_row(name, str(one.num_blocks), in_words(one.num_bytes), quota, "")
    return table


def _with_each(addresses: dict[str, str], ask: Callable[[str, "KvstoreAsyncStub"], Awaitable[T]]) -> list[T]:
    async def all_of_them() -> list[T]:
        answers = []
        for name, address in addresses.items():
            async with open_channel(address, peer=name) as channel:
                answers.append(await ask(name, KvstoreStub(channel)))
        return answers

    try:
        return asyncio.run(all_of_them())
    except FathomError as reason:
        _fail(str(reason))


def _with_all(addresses: dict[str, str], ask: Callable[[dict[str, "grpc.aio.Channel"]], Coroutine[Any, Any, T]]) -> T:
    async def all_at_once() -> T:
        async with AsyncExitStack() as stack:
            channels = {
                name: await stack.enter_async_context(open_channel(address, peer=name))
                for name, address in addresses.items()
            }
            return await ask(channels)

    try:
        return asyncio.run(all_at_once())
    except FathomError as reason:
        _fail(str(reason))


def _running(given: list[str] | None, *, may_be_none: bool = False) -> dict[str, str]:
    """Return the stores to ask, by name."""
    if given:
        try:
            return {one.name: one.address for text in given for one in parse_replicas(text)}
        except ValueError as reason:
            _fail(str(reason))
    suite = state.read(Home.of(Path.cwd()).state)
    if suite is not None and suite.is_running:
        return {one.name: one.address for one in suite.processes if one.service == "kvstore"}
    if not may_be_none:
        _fail("nothing is running here: run fathom up, or name a store with --address")
    return {}


def _folders() -> list[Path]:
    """Return this directory's store folders, one for each replica that ever ran here."""
    home = Home.of(Path.cwd())
    folders = sorted(lock.parent for lock in home.root.glob("kv*/lock"))
    if not folders:
        _fail("nothing is stored here")
    return folders


def _fingerprint(text: str, addresses: dict[str, str]) -> bytes:
    """Return the fingerprint with these hex digits, or the one stored fingerprint that begins with them."""
    if len(text) >= 2 * FINGERPRINT_BYTES or not re.fullmatch(f"[0-9a-f]{{{SHORT_DIGITS},}}", text):
        return _hex(text)

    async def ask(_name: str, stub: "KvstoreAsyncStub") -> list[bytes]:
        reply = await stub.GetStats(GetStatsRequest(), timeout=SECONDS)
        return [one.fingerprint for one in reply.fingerprints if one.fingerprint.hex().startswith(text)]

    found = {one for each in _with_each(addresses, ask) for one in each}
    if len(found) != 1:
        _fail(f"{_counted(len(found), 'stored fingerprint')} begin with {text}; give all 64 hex digits")
    return found.pop()


def _hex(text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != FINGERPRINT_BYTES:
        _fail(f"{text!r} is not 64 hex digits")
    return value


def _fail(reason: str) -> NoReturn:
    print(f"fathom: {reason}", file=sys.stderr)
    raise typer.Exit(1)
