"""Is no block torn and no acknowledged one lost, whenever the process is killed, and is the next start quick?"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from services.kvstore.directory import new_segment_file
from services.kvstore.format import pack_footer, record_bytes
from services.kvstore.index import BlockLocation
from services.kvstore.store import Store
from services.kvstore.tests.blocks import FINGERPRINT, key, payload, served

ROOT = Path(__file__).parents[3]
SIZES = (100, 30_000, 200_000)

# Writes batches of every size, class and tenant, and says which block is done; sealing, eviction and copies go on too.
WRITER = """
import asyncio, sys
from pathlib import Path
from services.kvstore.tests.blocks import block, open_store
from services.kvstore.tests.test_kill import SIZES

async def main():
    store = await open_store(Path(sys.argv[1]), max_bytes=1 << 30, segment_bytes=400_000)
    async def one(number):
        await store.write(block(number, SIZES[number % 3], retention=number % 3, tenant="ab"[number % 2]))
        print(number, flush=True)
    number = int(sys.argv[2])
    while True:
        await asyncio.gather(*(one(number + n) for n in range(5)))
        number += 5

asyncio.run(main())
"""


def write_until_killed(folder: Path, first: int, seconds: float) -> list[int]:
    """Let a process write blocks, kill -9 it, and return the numbers whose writes it was told are done."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
    return [int(line) for line in lines if line.endswith("\n")]


async def survive(folder: Path, num_kills: int, seed: int) -> None:
    """Kill, start, read everything back, over and over on the same folder."""
    rng = random.Random(seed)
    acknowledged: list[int] = []
    for life in range(num_kills):
        first = life * 100_000
        acknowledged += await asyncio.to_thread(write_until_killed, folder, first, rng.uniform(0.0, 0.2))

        started = time.monotonic()
        store = await Store.open(folder, max_bytes=1 << 30, segment_bytes=400_000)
        assert time.monotonic() - started < 30
        mine = [number for number in acknowledged if number >= first]
        # Earlier lives' blocks were all read once; a sample shows that they stay.
        others = rng.sample(acknowledged, min(20, len(acknowledged)))
        wanted = sorted({*mine, *others, *range(max(mine, default=first), max(mine, default=first) + 12)})
        found = await asyncio.wait_for(served(store, wanted), 120)
        await store.close()
        assert {n: payload(n, SIZES[n % 3]) for n in found} == found
        assert {*mine, *others} <= set(found)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_killed_at_any_moment_no_block_is_torn_and_no_acknowledged_one_lost(tmp_path: Path) -> None:
    """kill -9 at eight points of a write load."""
    await survive(tmp_path, 8, seed=4)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_killed_at_a_hundred_moments(tmp_path: Path) -> None:
    """The same at a hundred."""
    for part in range(10):
        await survive(tmp_path / str(part), 10, seed=100 + part)


OPEN = """
import asyncio, json, sys, time
from pathlib import Path
from services.kvstore.store import Store

async def main():
    started = time.process_time()
    store = await Store.open(Path(sys.argv[1]), max_bytes=1 << 40, segment_bytes=1 << 28)
    print(json.dumps({"seconds": time.process_time() - started, "blocks": store.num_blocks}))

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_start_takes_at_most_a_second_for_100_000_blocks(tmp_path: Path) -> None:
    """Sealed segments are read by their footers. Processor time: others may be busy on this machine."""
    num_segments, num_records = 20, 5000
    size = record_bytes(100)
    number = 0
    now = time.time()
    for segment in range(num_segments):
        file = new_segment_file(tmp_path, segment + 1, 1)
        locations = [
            BlockLocation(key(number + n), FINGERPRINT, segment + 1, n * size, 100, zlib.crc32(b""), 1, now, "t")
            for n in range(num_records)
        ]
        number += num_records
        with file.path.open("wb") as out:
            out.truncate(num_records * size)
            out.seek(num_records * size)
            out.write(pack_footer(locations, epoch=file.epoch, start_bytes=num_records * size))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert num_segments * num_records == report["blocks"]
    assert report["seconds"] < 1.0
