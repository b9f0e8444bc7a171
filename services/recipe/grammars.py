"""How does what a caller wants of an answer become a grammar that the engines obey?

Compiled ahead and off the event loop: the compiler lives in processes that are killed when a schema costs too much
(`grammar_worker.py`), so neither a stream nor an engine ever waits for a hostile one.
"""

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from proto.common_pb2 import Grammar
from services.chassis import telemetry
from services.chassis.errors import InternalError, Overloaded
from services.recipe.grammar_limits import invalid, read_grammar, read_pattern, read_schema, too_complex
from services.recipe.refusals import ApiError

KIND = "llguidance/1"
"""What the engines call a body that llguidance reads: {"grammars": [...]}, each a Lark grammar or a JSON schema."""
NUM_WORKERS = 2
JOB_SECONDS = 0.7
"""Longest time for one: those of real callers take milliseconds, and a refusal is due within a second."""
MAX_SKETCH_BYTES = 256 << 10
_START_SECONDS = 30.0
_WAIT_SECONDS = 10.0
_MAX_RESIDENT_BYTES = 128 << 20  # a worker that grew past it is replaced
_MAX_CACHED_BYTES = 8 << 20
_MAX_LINE_BYTES = 4 << 20
_WORKER = Path(__file__).with_name("grammar_worker.py")


@dataclass(frozen=True, slots=True)
class Part:
    """One language: a job of the worker in its words. where: the request field it came from."""

    where: str
    job: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sketch:
    """What an answer may be. frame: Lark around the parts, which it calls @part0, @part1...; "" for the one part alone.

    The frame is the dialect's, and may name control tokens by id: <[7]>. Parts are callers', and cannot.
    """

    parts: tuple[Part, ...]
    frame: str = ""
    where: str = ""
    """The request field that asked for the frame."""


def json_schema(given: Any, where: str) -> Part:
    """Return the language of a JSON schema; raise a 400 naming the keyword that cannot be enforced.

    The schema is enforced as it is written, `strict` or not: objects are open unless it closes them.
    """
    return Part(where, {"json_schema": read_schema(given, where)})


def json_object(where: str) -> Part:
    """Return the language of JSON objects."""
    return json_schema({"type": "object"}, where)


def regex(given: Any, where: str) -> Part:
    """Return the language of a regular expression, which the whole answer matches."""
    return Part(where, {"regex": read_pattern(given, where)})


def lark(given: Any, where: str) -> Part:
    """Return the language of a grammar in Lark or GBNF."""
    return Part(where, {"lark": read_grammar(given, where)})


class GrammarCompiler:
    """Sketches to grammars, remembered by (compiler version, tokenizer, sketch). Refusals are remembered too.

    Processes start when the first is needed. Close it in the end.
    """

    def __init__(
        self, tokenizer_digest: bytes, *, job_seconds: float = JOB_SECONDS, num_workers: int = NUM_WORKERS
    ) -> None:
        self._salt = hashlib.sha256(f"{KIND} {_compiler_version()} ".encode() + tokenizer_digest).digest()
        self._job_seconds = job_seconds
        self._places = asyncio.Semaphore(num_workers)
        self._idle: list[_Worker] = []
        self._running: dict[bytes, asyncio.Task[Grammar]] = {}
        self._known: OrderedDict[bytes, Grammar | ApiError] = OrderedDict()
        self._known_bytes = 0

    async def compile(self, sketch: Sketch) -> Grammar:
        """Return the grammar; raise a 400 for what cannot be obeyed, Overloaded when too many wait.

        Callers with equal sketches share one compilation, which goes on when one of them leaves.
        """
        job = json.dumps({"frame": sketch.frame, "parts": [part.job for part in sketch.parts]}).encode()
        if len(job) > MAX_SKETCH_BYTES:
            raise too_complex(_place(sketch, 0), f"must have at most {MAX_SKETCH_BYTES >> 10} KiB of schemas in all")
        # Errors name places, so equal schemas in different ones are different.
        places = "\n".join([sketch.where, *(part.where for part in sketch.parts)]).encode("utf-8", "replace")
        key = hashlib.sha256(self._salt + hashlib.sha256(places).digest() + job).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            if isinstance(known, ApiError):
                raise _again(known)
            return known
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._compile(key, job, sketch), name="compile grammar")
            self._running[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the processes."""
        for task in tuple(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        while self._idle:
            await self._idle.pop().end()

    @property
    def resident_bytes(self) -> int:
        """Memory of the processes that wait for work, as of their last answer."""
        return sum(worker.resident_bytes for worker in self._idle)

    def _forget(self, key: bytes, done: "asyncio.Task[Grammar]") -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # all who waited may have left

    async def _compile(self, key: bytes, job: bytes, sketch: Sketch) -> Grammar:
        try:
            answer = await self._ask(job)
        except _WorkerDiedError:
            refusal = too_complex(_place(sketch, 0), "costs too much time or memory to obey")
            self._remember(key, refusal)
            raise refusal from None
        if "body" not in answer:
            where = _place(sketch, answer["part"])
            refusal = (too_complex if answer["is_too_complex"] else invalid)(where, answer["error"])
            self._remember(key, refusal)
            raise refusal
        grammar = Grammar(kind=KIND, body=answer["body"].encode())
        self._remember(key, grammar)
        return grammar

    def _remember(self, key: bytes, known: Grammar | ApiError) -> None:
        self._known[key] = known
        self._known_bytes += _size(known)
        while self._known_bytes > _MAX_CACHED_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= _size(oldest)

    async def _ask(self, job: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise Overloaded("too many schemas are being compiled", retry_after=_WAIT_SECONDS / 2) from None
        worker = None
        try:
            while self._idle and worker is None:
                worker = self._idle.pop()
                if not worker.is_alive:  # the system took its memory back
                    await worker.end()
                    worker = None
            if worker is None:
                worker = await _Worker.start(self._job_seconds)
            answer = await worker.ask(job)
            if worker.resident_bytes <= _MAX_RESIDENT_BYTES:
                self._idle.append(worker)
                worker = None
            return answer
        finally:
            if worker is not None:
                await worker.end()
            self._places.release()


class _WorkerDiedError(Exception):
    """The process ended during a job: it was too much for it."""


class _Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self.resident_bytes = 0

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @classmethod
    async def start(cls, seconds: float) -> "_Worker":
        """Start a process and wait until it is ready. Its environment is empty: it compiles what strangers send."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-s", "-E", str(_WORKER), str(seconds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            env={},
        )
        worker = cls(process, _START_SECONDS)
        try:
            await worker.ask(b"")
        except _WorkerDiedError as exc:
            await worker.end()
            raise InternalError("the grammar compiler does not start: is llguidance installed?") from exc
        except BaseException:
            await worker.end()
            raise
        worker._seconds = seconds + 1.0  # it ends itself; this is for one that cannot
        return worker

    async def ask(self, job: bytes) -> dict[str, Any]:
        """Return the answer to a job; raise _WorkerDiedError. An empty job waits for the greeting."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._seconds):
                if job:
                    self._process.stdin.write(job + b"\n")
                    await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except (TimeoutError, ConnectionError) as exc:
            raise _WorkerDiedError from exc
        if not line.endswith(b"\n"):
            raise _WorkerDiedError
        answer: dict[str, Any] = json.loads(line)
        self.resident_bytes = answer.get("resident_bytes", 0)
        return answer

    async def end(self) -> None:
        """End the process, whatever it is doing."""
        with suppress(ProcessLookupError):
            self._process.kill()
        code = await self._process.wait()
        telemetry.log.info("recipe.grammar_worker.ended", code=code, resident_bytes=self.resident_bytes)


def _again(refusal: ApiError) -> ApiError:
    """Return a new exception for an old refusal: one that is raised twice drags its first traceback along."""
    return ApiError(refusal.status, refusal.message, param=refusal.param, code=refusal.code)


def _place(sketch: Sketch, part: int) -> str:
    return sketch.parts[part].where if part < len(sketch.parts) else sketch.where


def _size(known: Grammar | ApiError) -> int:
    return 512 + (len(known.body) if isinstance(known, Grammar) else len(known.message))


def _compiler_version() -> str:
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return ""
