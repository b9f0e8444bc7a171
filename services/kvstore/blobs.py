"""How do whole objects and ranges of them get in and out of an object store?

One thin face over obstore: any S3 API, a mounted folder (NFS, CephFS, 3FS), or memory. Every call has a deadline and
one of a bounded number of places, passes a breaker, and moves a bounded number of bytes. Paths are relative to the
URL.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from services.kvstore.breaker import Breaker, BreakerRules, BreakerState
from services.kvstore.store_clock import StoreClock

MAX_RANGE_BYTES = 64 << 20
"""Longest single read: the longest block."""
MAX_PUT_BYTES = 32 << 20
"""Longest object that is put in one piece; longer ones go as streams."""
PART_BYTES = 8 << 20
"""Of an uploaded stream; two are in memory."""
_LIST_PAGE = 500
_DATED_PATH = "clock/mark"
_NEARLY = 0.9

T = TypeVar("T")


class BlobError(Exception):
    """The object store failed, was too slow, or is being left alone."""


class BlobMissingError(BlobError):
    """There is no such object, or it is shorter than asked for: the store itself is well."""


class BlobOptions(BaseModel):
    """What a mounted file may say, as JSON: who we are to the object store, and how patient."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(default="", pattern=r"^$|^https?://[^\s/]+/?$")
    """Base URL of the S3 API; empty takes AWS's own."""
    region: str = "us-east-1"
    access_key_id: SecretStr = SecretStr("")
    secret_access_key: SecretStr = SecretStr("")
    session_token: SecretStr = SecretStr("")
    is_path_style: bool = True
    """Whether the bucket is part of the path (most clusters of one's own) or of the host name (AWS)."""

    connect_seconds: float = Field(default=1.0, gt=0)
    read_seconds: float = Field(default=2.0, gt=0)
    """Longest a read may take; a block that comes later than it is computed is a miss."""
    slow_seconds: float = Field(default=1.0, gt=0)
    """A read that took longer is a bad one to the breaker."""
    write_seconds: float = Field(default=60.0, gt=0)
    """Longest an upload or a listing may take, beside a second for every MiB."""
    max_calls: int = Field(default=16, ge=2)
    """Calls at once."""
    open_seconds: float = Field(default=2.0, gt=0)
    """How long the store is left alone after three bad calls of ten; doubles up to 30 s."""

    refresh_seconds: float = Field(default=15.0, gt=0)
    """How often new manifests are listed: how long blocks of others may stay unknown if no news came of them."""
    news_seconds: float = Field(default=2.0, gt=0)
    """How often it is asked what others published just now: one listing of half a minute's names."""
    early_seconds: float = Field(default=2.0, ge=0)
    """How often the new blocks of open segments are uploaded; 0 uploads sealed segments only."""
    seal_seconds: float = Field(default=60.0, gt=0)
    """Open segments are sealed and uploaded whole after that."""
    max_queue_bytes: int = Field(default=64 << 30, ge=0)
    """Sealed segments that wait for their upload (on the disk, not in memory); beyond it the oldest stay behind."""
    max_queue_seconds: float = Field(default=6 * 3600.0, gt=0)
    """How long one may wait; then it stays behind too."""
    max_blocks: int = Field(default=1_000_000, ge=0)
    """Blocks of the object store that are kept in mind, about 250 bytes of memory each; those that end first are
    forgotten."""
    unspecified_seconds: float = Field(default=7 * 86400.0, gt=0)
    """How long blocks without a retention class stay."""


def load_options(path: Path | None) -> BlobOptions:
    """Return what the file says, or the defaults; raise ValueError that names what is wrong, without its secrets."""
    if path is None:
        return BlobOptions()
    try:
        return BlobOptions.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as exc:
        faults = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors(include_input=False)]
        raise ValueError(f"{path}: {'; '.join(faults)}") from None
    except (OSError, ValueError) as exc:
        raise ValueError(f"{path}: {type(exc).__name__}") from None


@dataclass(frozen=True, slots=True)
class Blob:
    """One object of a listing."""

    path: str
    num_bytes: int
    modified: datetime


class BlobBackend:
    """Objects under one URL. Methods raise BlobError, never hang, and hold up nobody who calls another one."""

    def __init__(self, store: ObjectStore, options: BlobOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self.time = StoreClock()
        rules = BreakerRules(open_seconds=options.open_seconds)
        # Apart: a store that is full, or takes nothing from us, can still be read.
        self.reads, self.writes = Breaker(rules), Breaker(rules)
        self._store = store
        self._clock = clock
        self._places = asyncio.Semaphore(options.max_calls)

    @property
    def is_away(self) -> bool:
        """Whether reads are refused at once."""
        return self.reads.state(self._clock()) is not BreakerState.CLOSED

    @property
    def is_read_only(self) -> bool:
        """Whether writes are refused at once, and it is not time for a trial yet."""
        return self.writes.state(self._clock()) is BreakerState.OPEN

    @property
    def seconds_to_trial(self) -> float:
        """How long reads will be refused."""
        return self.reads.seconds_to_trial(self._clock())

    @property
    def seconds_to_write(self) -> float:
        """How long writes will be refused."""
        return self.writes.seconds_to_trial(self._clock())

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create an object whole; False, and no change, when there is one of this name."""
        _check_size(len(data), MAX_PUT_BYTES)
        try:
            await self._call(
                self.writes,
                lambda: obstore.put_async(self._store, path, data, mode="create"),
                self._patience(len(data)),
            )
        except AlreadyExistsError:
            return False
        return True

    async def put_stream(self, path: str, pieces: AsyncIterator[bytes | memoryview], num_bytes: int) -> None:
        """Write an object of about `num_bytes` from pieces; it is there whole or not at all, and replaces another."""
        await self._call(
            self.writes,
            lambda: obstore.put_async(self._store, path, pieces, chunk_size=PART_BYTES, max_concurrency=1),
            self._patience(num_bytes),
        )

    async def get_range(self, path: str, start: int, num_bytes: int) -> memoryview:
        """Return exactly these bytes of an object; raise BlobMissingError when they are not there."""
        _check_size(num_bytes, MAX_RANGE_BYTES)
        found = await self._call(
            self.reads,
            lambda: obstore.get_range_async(self._store, path, start=start, length=num_bytes),
            self.options.read_seconds,
            slow_seconds=self.options.slow_seconds,
        )
        view = memoryview(found)
        if view.nbytes != num_bytes:
            raise BlobMissingError(f"{path} has {view.nbytes} of {num_bytes} bytes at {start}")
        return view

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Return an object whole; raise BlobMissingError when it is not there, BlobError when it is too long."""

        async def whole() -> bytes:
            result = await obstore.get_async(self._store, path)
            if result.meta["size"] > max_bytes:
                raise BlobError(f"{path} has {result.meta['size']} bytes; at most {max_bytes} are expected")
            return bytes(await result.bytes_async())

        return await self._call(self.reads, whole, self._patience(max_bytes))

    async def delete(self, path: str) -> None:
        """Remove an object; one that is not there is gone already."""
        try:
            await self._call(self.writes, lambda: obstore.delete_async(self._store, path), self.options.write_seconds)
        except BlobMissingError:
            return

    async def list(self, prefix: str, *, after: str = "", max_blobs: int) -> list[Blob]:
        """Return the objects whose paths start with `prefix` (up to a "/") and come after `after`; at most so many."""

        async def pages() -> list[Blob]:
            found: list[Blob] = []
            stream = obstore.list(self._store, prefix, offset=after or None, chunk_size=_LIST_PAGE)
            async for page in stream:
                found += [Blob(one["path"], one["size"], one["last_modified"]) for one in page]
                if len(found) >= max_blobs:
                    break
            return found[:max_blobs]

        listed = await self._call(self.reads, pages, self.options.write_seconds)
        if listed:
            self.time.saw(max(blob.modified for blob in listed).timestamp())
        return listed

    async def ask_time(self) -> None:
        """Set the clock by an object that is written for the purpose: two calls.

        Whoever may not write sees the last one that another replica wrote: a bound, and within the hour while any does.
        """
        try:
            await self._call(
                self.writes, lambda: obstore.put_async(self._store, _DATED_PATH, b""), self.options.write_seconds
            )
        finally:
            dated = await self.list(_DATED_PATH.partition("/")[0], max_blobs=1)
        for blob in dated:
            self.time.set(blob.modified.timestamp())

    async def _call(
        self,
        breaker: Breaker,
        work: Callable[[], Awaitable[T]],
        patience_seconds: float,
        *,
        slow_seconds: float | None = None,
    ) -> T:
        """Do one call within its time; tell the breaker how it went."""
        try:
            async with asyncio.timeout(patience_seconds), self._places:
                return await self._judged(breaker, work, slow_seconds or _NEARLY * patience_seconds)
        except TimeoutError:
            raise BlobError(f"no answer from the object store in {patience_seconds:g} s") from None

    async def _judged(self, breaker: Breaker, work: Callable[[], Awaitable[T]], slow_seconds: float) -> T:
        began = self._clock()
        permit = breaker.begin(began)
        if permit is None:
            raise BlobError("the object store is left alone after failures")
        is_good: bool | None = None
        try:
            result = await work()
            is_good = self._clock() - began <= slow_seconds
        except FileNotFoundError as exc:
            is_good = True
            raise BlobMissingError(_first_line(exc)) from None
        except (AlreadyExistsError, BlobError):
            is_good = True
            raise
        except (BaseError, OSError, ValueError) as exc:
            is_good = False
            raise BlobError(_first_line(exc)) from None
        except asyncio.CancelledError:
            # Cut off: by our deadline, which is the store's fault, or by a caller who left sooner, which says nothing.
            is_good = False if self._clock() - began > slow_seconds else None
            raise
        finally:
            if is_good is None:
                breaker.abandon(permit)
            else:
                breaker.end(permit, is_good=is_good, now=self._clock())
        return result

    def _patience(self, num_bytes: int) -> float:
        return self.options.write_seconds + num_bytes / (1 << 20)


def open_blobs(url: str, options: BlobOptions) -> BlobBackend:
    """Return the objects under s3://BUCKET/PREFIX, file:///FOLDER or memory://; raise ValueError for another URL.

    Nothing is called yet: an object store that is away is no reason not to start.
    """
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    match parts.scheme:
        case "s3" if parts.netloc:
            return BlobBackend(_s3(parts.netloc, path, options), options)
        case "file" if not parts.netloc and path:
            return BlobBackend(LocalStore(Path("/", path), mkdir=True), options)
        case "memory" if not parts.netloc and not path:
            return BlobBackend(MemoryStore(), options)
    raise ValueError(f"{url!r} is not s3://BUCKET/PREFIX, file:///FOLDER or memory://")


def _s3(bucket: str, prefix: str, options: BlobOptions) -> ObjectStore:
    config: dict[str, str | bool] = {
        "region": options.region,
        "virtual_hosted_style_request": not options.is_path_style,
    }
    if options.endpoint:
        config["endpoint"] = options.endpoint.rstrip("/")
    for name in ("access_key_id", "secret_access_key", "session_token"):
        if value := getattr(options, name).get_secret_value():
            config[name] = value
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=config,  # type: ignore[arg-type]  # a plain dict of the same keys
        client_options={
            "allow_http": options.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=options.connect_seconds),
            # The deadline of each call is ours; this one only ends what nobody waits for any more.
            "timeout": timedelta(seconds=4 * options.write_seconds),
        },
        # Our callers retry or miss; a retry in here would be time that nobody counted.
        retry_config={"max_retries": 0},
    )


def _check_size(num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise ValueError(f"{num_bytes} bytes in one call; at most {limit} are allowed")


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0][:300]
