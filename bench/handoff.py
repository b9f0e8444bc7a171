"""How fast does KV travel from a prefill to a decode replica? `python -m bench.handoff [shm] [tcp] [grpc]`, a minute.

Two processes with real engines, caches and handoffs on one machine; the model is small, its blocks are as large as the
default model's. Each figure is printed with its yardstick from the same run: half a plain copy's rate for shared memory
(the bytes are copied once on each side), a blocking socket for TCP and gRPC, where "grpc" is `Push` alone, without the
socket beside it; that is printed beside a stream by grpc.aio, too, of as large messages with which nothing is done.
Rates are the best of all rounds on both sides, for whatever else runs on a machine only ever slows them down; the ratio
of the medians is printed too, and the median of the ratios of neighbours, of which both suffer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from isal import isal_zlib
from prometheus_client import CollectorRegistry

from bench.engine_models import write_model
from bench.machine import describe
from kernels.batch import SamplingParams
from kernels.executor import Executor
from proto.prefill_pb2 import PrefillDeliver
from services.chassis.block_keys import block_keys
from services.chassis.channel import open_channel
from services.chassis.engine_thread import EngineThread
from services.chassis.handoff import StagingFolder
from services.chassis.memory import keep_freed_memory
from services.chassis.testing import serve
from services.decode.lanes import Lanes
from services.decode.metrics import DecodeMetrics
from services.decode.server import add_to_server
from services.decode.server import assemble as assemble_decode
from services.prefill.handoff import Cargo, Handoff
from services.prefill.metrics import PrefillMetrics
from services.prefill.prompt import FirstTokenSampled, Happening, Prompt
from services.prefill.pushing import PromptBlocks
from services.prefill.server import assemble as assemble_prefill

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""Blocks of 3 MiB in bf16; SmolLM2's have 2.8."""
BACKENDS = ("shm", "tcp", "grpc")
NUM_BLOCKS = 32
ROUNDS = 15
MEBIBYTE = 1 << 20
CHUNK_BYTES = 2 << 20
BOOT = "bench"
_BARE = "/fathom.bench.Bare/Push"
SETTLE_SECONDS = 0.4
"""Room is made and mapped while the last chunk is computed; a small model's takes no time, so it is waited for."""


def main() -> None:
    """Print one JSON line per figure."""
    keep_freed_memory()  # as each service does when it starts
    if sys.argv[1:2] == ["decode"]:
        asyncio.run(_decode(Path(sys.argv[2]), sys.argv[3]))
        return
    if sys.argv[1:2] == ["bare"]:
        asyncio.run(_bare_receiver())
        return
    _checksums()
    with tempfile.TemporaryDirectory(prefix="fathom-bench-handoff-") as folder:
        write_model(CONFIG, Path(folder), seed=1, dtype=torch.bfloat16)
        for backend in [each for each in BACKENDS if each in sys.argv] or BACKENDS:
            asyncio.run(_handoffs(Path(folder), backend))


def _checksums() -> None:
    payload = os.urandom(3 * MEBIBYTE)
    rates = {name: 3 / _median(partial(crc, payload)) for name, crc in (("isal", isal_zlib.crc32), ("z", zlib.crc32))}
    _print(
        name="block_checksum",
        mebibytes_per_second=rates["isal"],
        yardstick="zlib.crc32",
        yardstick_mebibytes_per_second=rates["z"],
        ratio=rates["isal"] / rates["z"],
    )


async def _handoffs(folder: Path, backend: str) -> None:
    decode = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.handoff", "decode", str(folder), backend, stdout=subprocess.PIPE
    )
    try:
        assert decode.stdout is not None
        address = (await decode.stdout.readline()).decode().strip()
        rates, yardsticks = await _measure(folder, address, backend)
    finally:
        if decode.returncode is None:
            decode.kill()
        await decode.wait()
        if decode.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the decode process ended by itself with {decode.returncode}")
    rate, yardstick = max(rates), max(yardsticks)
    bare: dict[str, object] = {}
    if backend == "grpc":
        streams = await _bare_streams(NUM_BLOCKS, NUM_BLOCKS * 3 * MEBIBYTE)
        bare = {"bare_stream_mebibytes_per_second": max(streams), "bare_ratio": max(streams) / yardstick}
        bare["median_of_bare"] = statistics.median(rates) / statistics.median(streams)
    _print(
        name=f"handoff_{backend}",
        mebibytes_per_second=rate,
        yardstick="half of a plain copy" if backend == "shm" else f"blocking socket, {CHUNK_BYTES // MEBIBYTE} MiB",
        yardstick_mebibytes_per_second=yardstick,
        ratio=rate / yardstick,
        median_ratio=statistics.median(rates) / statistics.median(yardsticks),
        paired_ratio=statistics.median(mine / theirs for mine, theirs in zip(rates, yardsticks, strict=True)),
        mebibytes=NUM_BLOCKS * 3,
        rounds=len(rates),
        **bare,
    )


async def _measure(folder: Path, address: str, backend: str) -> tuple[list[float], list[float]]:
    """Return the rates of handoffs, and of the yardstick between them, in MiB/s."""
    thread = EngineThread("prefill engine")
    thread.start()
    executor = await thread.call(_load, folder, 2 * NUM_BLOCKS)
    channel = open_channel(address, peer="decode")
    replica = assemble_prefill(
        executor,
        thread,
        PrefillMetrics(CollectorRegistry()),
        chunk_tokens=1024,
        channel=lambda _address: channel,
    )
    prompt, first = await _computed(thread, replica.engine, executor)
    cargo_bytes = NUM_BLOCKS * executor.layout.block_bytes
    yardstick = partial(_half_copy, cargo_bytes) if backend == "shm" else partial(_blocking_socket, cargo_bytes)
    rates, yardsticks = [], []
    for number in range(ROUNDS + 1):
        seconds = await _one(thread, replica.engine, executor, prompt, channel, address, f"round-{number}", first)
        rates.append(cargo_bytes / MEBIBYTE / seconds)
        yardsticks.append(await asyncio.to_thread(yardstick))
        await asyncio.sleep(0.2)
    await channel.close()
    await thread.stop()
    return rates[1:], yardsticks[1:]  # the first one warms up


async def _computed(thread: EngineThread, engine: Any, executor: Executor) -> tuple[Prompt, FirstTokenSampled]:
    done: asyncio.Future[FirstTokenSampled] = asyncio.get_running_loop().create_future()

    def hear(happening: Happening) -> None:
        if isinstance(happening, FirstTokenSampled):
            done.set_result(happening)

    tokens = [n * 7919 % 300 + 3 for n in range(NUM_BLOCKS * executor.layout.block_tokens)]
    keys = block_keys(b"r" * 32, tokens, block_tokens=executor.layout.block_tokens)
    prompt = Prompt(tokens, keys, SamplingParams(temperature=0.0), 0, 0, hear)
    thread.post(engine.submit, prompt)
    return prompt, await done


async def _one(
    thread: EngineThread,
    engine: Any,
    executor: Executor,
    prompt: Prompt,
    channel: Any,
    address: str,
    name: str,
    first: FirstTokenSampled,
) -> float:
    """Hand the prompt over; return the seconds from the first token to decode's answer to the commit."""
    cargo = Cargo(
        request_id=name,
        fingerprint=executor.fingerprint,
        keys=prompt.keys,
        kv_tokens=len(prompt.token_ids),
        num_blocks=NUM_BLOCKS,
        block_bytes=executor.layout.block_bytes,
        window_bytes=0,
    )
    target = PrefillDeliver(request_id=name, replica="decode-0", boot_id=BOOT, address=address)
    handoff = Handoff(channel, target, cargo, deadline_unix_seconds=time.time() + 20)
    await asyncio.sleep(SETTLE_SECONDS)
    started = time.perf_counter()
    await handoff.deliver(PromptBlocks(thread, engine, prompt), first_token_id=first.sampled.token_id, cached_tokens=0)
    return time.perf_counter() - started


async def _decode(folder: Path, backend: str) -> None:
    """Be the decode replica: say the address, take what comes and let it go.

    backend: "shm", or over the network by "tcp" or, as when only gRPC gets through, by "grpc".
    """
    thread = EngineThread("decode engine")
    thread.start()
    executor = await thread.call(_load, folder, 2 * NUM_BLOCKS + 8)
    staging = StagingFolder(f"bench-{os.getpid()}") if backend == "shm" else None
    replica = assemble_decode(
        executor,
        thread,
        DecodeMetrics(CollectorRegistry()),
        replica="decode-0",
        boot_id=BOOT,
        max_batch=8,
        folder=staging.path if staging is not None else None,
        channel=open_channel,
    )
    if backend != "grpc":
        Lanes.open(replica.intake, "127.0.0.1", 0)
    async with serve(lambda server: add_to_server(replica, server)) as address:
        print(address, flush=True)
        for number in range(ROUNDS + 1):
            landed = await replica.intake.landed(f"round-{number}")
            thread.post(replica.engine.rooms.release, landed.epoch)
        if staging is not None:
            staging.close()
        await asyncio.sleep(300)


def _load(folder: Path, num_blocks: int) -> Executor:
    executor = Executor.load(folder, dtype="bf16", num_blocks=num_blocks + 1, threads=1)
    for block in range(1, num_blocks + 1):  # as after a while of serving: no page is used for the first time
        executor.write_block(block, bytes(executor.layout.block_bytes))
    return executor


async def _bare_streams(num_messages: int, num_bytes: int) -> list[float]:
    """Return the rates of a stream of messages that exist already, to somebody who only counts them, in MiB/s."""
    receiver = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.handoff", "bare", stdout=subprocess.PIPE
    )
    try:
        assert receiver.stdout is not None
        address = (await receiver.stdout.readline()).decode().strip()
        message = os.urandom(num_bytes // num_messages)

        async def messages() -> AsyncIterator[bytes]:
            for _ in range(num_messages):
                yield message

        rates = []
        async with open_channel(address, peer="bare") as channel:
            call: Any = channel.stream_unary(_BARE, request_serializer=bytes, response_deserializer=bytes)
            for _ in range(ROUNDS + 1):
                started = time.perf_counter()
                await call(messages(), timeout=20)
                rates.append(num_bytes / MEBIBYTE / (time.perf_counter() - started))
                await asyncio.sleep(0.1)
        return rates[1:]
    finally:
        receiver.kill()
        await receiver.wait()


async def _bare_receiver() -> None:
    async def count(messages: AsyncIterator[bytes], _context: Any) -> bytes:
        return str(sum([len(message) async for message in messages])).encode()

    service, _, method = _BARE[1:].partition("/")
    handler = grpc.stream_unary_rpc_method_handler(count, request_deserializer=bytes, response_serializer=bytes)
    async with serve(lambda server: server.add_registered_method_handlers(service, {method: handler})) as address:
        print(address, flush=True)
        await asyncio.sleep(300)


def _half_copy(num_bytes: int) -> float:
    """Return half the rate of copying as many bytes from one warm place to another, in MiB/s."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return num_bytes / MEBIBYTE / _median(lambda: np.copyto(target, source)) / 2


def _blocking_socket(num_bytes: int) -> float:
    """Return the rate of sendall and recv_into between two processes over loopback TCP, in MiB/s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [str(server.getsockname()[1]), str(num_bytes), str(CHUNK_BYTES)]
        receiver = subprocess.Popen([sys.executable, "-c", _RECEIVER, *arguments])
        connection, _ = server.accept()
    payload = memoryview(bytearray(CHUNK_BYTES))
    with connection:
        started = time.perf_counter()
        for start in range(0, num_bytes, CHUNK_BYTES):
            connection.sendall(payload[: min(CHUNK_BYTES, num_bytes - start)])
        connection.recv(1)
        seconds = time.perf_counter() - started
    receiver.wait(5)
    return num_bytes / MEBIBYTE / seconds


_RECEIVER = """
import socket, sys
port, left, size = map(int, sys.argv[1:])
buffer = memoryview(bytearray(size))
connection = socket.create_connection(("127.0.0.1", port))
while left > 0:
    left -= connection.recv_into(buffer)
connection.sendall(b"!")
"""


def _median(work: Callable[[], object], rounds: int = 5) -> float:
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _print(**fields: object) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps({**rounded, "machine": describe()}), flush=True)


if __name__ == "__main__":
    main()
