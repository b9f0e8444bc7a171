"""Does a failing disk cost blocks only: nothing wrong, nothing half, and service again once it is mended?"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.kvstore.tests.blocks import open_store, payload, served

ROOT = Path(__file__).parents[3]

# Runs with the faulty disk under it, and prints what became of each step.
STEPS = """
import asyncio, json, sys
from pathlib import Path
from typing import Any
from services.chassis.errors import Overloaded
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, payload, served

async def outcome(store, number):
    try:
        return (await store.write(block(number, 50_000))).value
    except Overloaded as exc:
        return "refused"

async def main(folder, faults, fault):
    store = await open_store(folder)
    report = {"before": [await outcome(store, n) for n in range(3)]}
    faults.write_text(fault)
    report["during"] = await asyncio.gather(*(outcome(store, n) for n in range(3, 9)))
    report["found"] = [n for n in range(20) if store.has(FINGERPRINT, key(n))]
    during = await served(store, list(range(9)))
    report["right"] = all(payload(n, 50_000) == data for n, data in during.items())
    report["served"] = sorted(during)
    faults.write_text("")
    report["after"] = [await outcome(store, n) for n in range(9, 12)]
    report["again"] = [await outcome(store, n) for n in range(3, 5)]
    found = await served(store, list(range(12)))
    report["right"] &= all(payload(n, 50_000) == data for n, data in found.items())
    report["end"] = sorted(found)
    report["drops"] = dict(store.counts.write_drops)
    report["damaged"] = store.counts.damaged_blocks
    await store.close()
    print(json.dumps(report))

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preloaded library; the tests are skipped where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here: the faulty disk cannot be built")
    library = tmp_path_factory.mktemp("shim") / "faulty_disk.so"
    source = Path(__file__).with_name("faulty_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def run(shim: Path, folder: Path, fault: str) -> Any:
    faults = folder.parent / "faults"
    faults.write_text("")
    environment = {"LD_PRELOAD": str(shim), "FAULTS": str(faults), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(folder), str(faults), fault],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["write-ENOSPC", "write-EIO", "short-ENOSPC", "sync-EIO"])
async def test_what_the_disk_refuses_is_never_found(tmp_path: Path, shim: Path, fault: str) -> None:
    """Failed writes and failed syncs publish nothing; older blocks are served on; later ones work; so does a restart."""
    folder = tmp_path / "kv"
    report = run(shim, folder, fault)
    assert ["stored"] * 3 == report["before"]
    assert ["refused"] * 6 == report["during"]
    assert [0, 1, 2] == report["found"] == report["served"]
    assert ["stored"] * 3 == report["after"]
    assert ["stored"] * 2 == report["again"]
    assert [0, 1, 2, 3, 4, 9, 10, 11] == report["end"]
    assert report["right"]
    assert {"disk": 6} == report["drops"]

    store = await open_store(folder)
    found = await served(store, list(range(12)))
    assert {n: payload(n, 50_000) for n in found} == found
    assert {0, 1, 2, 3, 4, 9, 10, 11} <= set(found)
    await store.close()


@pytest.mark.slow
async def test_unreadable_sectors_are_misses(tmp_path: Path, shim: Path) -> None:
    """EIO on a read is that block's miss, counted; the store serves on and takes the block again."""
    report = run(shim, tmp_path / "kv", "read-EIO")
    assert ["stored"] * 6 == report["during"]
    assert [] == report["served"]
    assert 9 == report["damaged"]
    assert [3, 4, 9, 10, 11] == report["end"]
    assert report["right"]
