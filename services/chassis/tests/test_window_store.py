"""Where do window states wait for the next prompt that begins the same?"""

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.chassis.window_store import WindowStore, WindowWorker, folders

STATE = 200
BLOCK = 16
FILE = STATE + 100  # the header's bytes


def key(n):
    return bytes([n]) * 32


def payload(n):
    return bytes([n + 1]) * STATE


@pytest.fixture
def open_store(tmp_path):
    opened = []

    def make(*, fingerprint=b"f" * 32, kind="whole", max_bytes=1 << 20):
        asked = {"kind": kind, "state_bytes": STATE, "block_tokens": BLOCK, "max_bytes": max_bytes}
        opened.append(WindowStore(fingerprint=fingerprint, root=tmp_path, **asked))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def give_away(path):
    """Make it another user's."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def files_of(store):
    return [path for path in store.folder.iterdir() if path.name not in {"users", "writing"}]


def test_what_one_replica_saves_another_loads(open_store):
    """By key and exact position, whoever has the same model; the files are in a private folder."""
    one, two = open_store(), open_store()
    assert one.save(key(1), 32, payload(1))

    assert payload(1) == two.load(key(1), 32)
    assert (None, None) == (two.load(key(1), 48), two.load(key(2), 32))
    assert FILE == one.counts.num_bytes == files_of(one)[0].stat().st_size
    assert 0o700 == one.folder.stat().st_mode & 0o777
    assert one.folder == two.folder


def test_models_and_kinds_do_not_mix(open_store):
    """Another fingerprint has a folder of its own, an encoder part a file of its own."""
    store = open_store()
    store.save(key(1), 32, payload(1))

    assert open_store(fingerprint=b"g" * 32).load(key(1), 32) is None
    assert open_store(kind="encoder").load(key(1), 32) is None
    with pytest.raises(ValueError, match="200 bytes"):
        store.save(key(1), 32, b"short")


@given(st.integers(0, FILE - 1), st.integers(1, 255))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_is_a_miss_and_removes_the_file(open_store, place, change):
    """Header or payload, wherever the damage is."""
    store = open_store()
    store.save(key(1), 32, payload(1))
    (path,) = files_of(store)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= change
    path.write_bytes(damaged)

    assert store.load(key(1), 32) is None
    assert [] == files_of(store)
    assert 1 == store.counts.num_damaged


@pytest.mark.parametrize(
    "trouble", ["short", "long", "empty", "renamed", "other key", "other model", "link", "folder", "pipe", "foreign"]
)
def test_any_doubt_is_a_miss(open_store, tmp_path, trouble):
    """A file that is whole, but not the one asked for, is no state either."""
    store = open_store()
    store.save(key(1), 32, payload(1))
    (path,) = files_of(store)
    content = path.read_bytes()
    path.unlink()
    match trouble:
        case "short":
            path.write_bytes(content[:-1])
        case "long":
            path.write_bytes(content + b"x")
        case "empty":
            path.touch()
        case "renamed":
            path.with_name(path.name.replace(".32.", ".48.")).write_bytes(content)
        case "other key":
            path.with_name(path.name.replace(key(1).hex(), key(2).hex())).write_bytes(content)
        case "foreign":
            path.write_bytes(content)
            give_away(path)
        case "other model":
            other = open_store(fingerprint=b"g" * 32)
            other.save(key(1), 32, payload(1))
            path.write_bytes(files_of(other)[0].read_bytes())
        case "link":
            (tmp_path / "elsewhere").write_bytes(content)
            path.symlink_to(tmp_path / "elsewhere")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)

    wanted = key(2 if trouble == "other key" else 1), 48 if trouble == "renamed" else 32
    assert store.load(*wanted) is None
    assert (trouble == "folder") == bool(files_of(store))


def test_the_longest_unused_goes_first(open_store):
    """Within the byte budget; a hit makes a state young again, and so does saving it twice."""
    store = open_store(max_bytes=3 * FILE)
    for n in range(3):
        store.save(key(n), 32, payload(n))
    store.load(key(0), 32)
    store.save(key(1), 32, payload(1))
    store.save(key(3), 32, payload(3))

    assert [True, True, False, True] == [store.load(key(n), 32) is not None for n in range(4)]
    assert (1, 3 * FILE) == (store.counts.num_evicted, store.counts.num_bytes)


def test_a_budget_below_one_state_keeps_none(open_store):
    """It is dropped and counted, and nothing else is removed for its sake."""
    store = open_store(max_bytes=FILE - 1)

    assert not store.save(key(1), 32, payload(1))
    assert (1, 0, []) == (store.counts.num_dropped, store.counts.num_evicted, files_of(store))


def test_a_torn_file_of_a_dead_writer_is_removed(open_store):
    """Nobody reads it, and the next save gives its room back."""
    store = open_store()
    (store.folder / f".{key(9).hex()}.32.whole").write_bytes(b"half")
    store.save(key(1), 32, payload(1))

    assert 1 == len(files_of(store))


SCRIPT = """
import pathlib, sys
from services.chassis.window_store import WindowStore
root, seed, budget = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = WindowStore(fingerprint=b"f" * 32, kind="whole", state_bytes=200, block_tokens=16, max_bytes=budget, root=root)
print("open", flush=True)
sys.stdin.readline()
for step in range(120):
    n = (step * 7 + seed * 3) % 23
    store.save(bytes([n]) * 32, 32, bytes([n + 1]) * 200)
    got = store.load(bytes([(n + 5) % 23]) * 32, 32)
    assert got in (None, bytes([(n + 5) % 23 + 1]) * 200), "wrong bytes"
    files = [path for path in store.folder.iterdir() if path.name.endswith(".whole") and path.name[0] != "."]
    assert len(files) * 300 <= budget, len(files)
print(store.counts.num_hits, store.counts.num_damaged, store.counts.num_dropped)
store.close()
"""


def test_two_processes_share_one_budget(tmp_path):
    """Saving, reading and evicting at once: right bytes or none, and never more than the budget."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(n), str(9 * FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    for child in children:
        assert child.stdout
        child.stdout.readline()
    for child in children:  # both are open: now they start
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    said = [child.communicate(timeout=60)[0] for child in children]

    assert ["0 0 0\n"] * 2 == said  # load alone counts no hits; nothing was damaged or dropped


def test_a_writer_that_was_stopped_holds_nobody_up(open_store, monkeypatch):
    """Its lock costs others their state, not their prompts: those who search wait behind a save."""
    monkeypatch.setattr("services.chassis.window_store._LOCK_SECONDS", 0.05)
    store = open_store()
    with (store.folder / "writing").open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert not store.save(key(1), 32, payload(1))
    assert 1 == store.counts.num_dropped
    assert store.save(key(1), 32, payload(1))


def test_states_outlive_the_replicas(open_store, tmp_path):
    """A restart finds what was saved before it."""
    one = open_store()
    one.save(key(1), 32, payload(1))
    one.close()

    assert payload(1) == open_store().load(key(1), 32)
    assert [one.folder] == folders(tmp_path)


def test_a_removed_folder_is_made_again(open_store):
    """Whoever cleans up shared memory takes the states, not the store."""
    store = open_store()
    store.save(key(1), 32, payload(1))
    shutil.rmtree(store.folder)
    assert store.load(key(1), 32) is None
    assert store.save(key(2), 32, payload(2))

    assert payload(2) == open_store().load(key(2), 32)


@pytest.mark.parametrize("fingerprint", [b"f" * 32, b"g" * 32])
def test_after_a_crash_of_all_the_same_model_finds_its_states(open_store, tmp_path, fingerprint):
    """When another model starts instead, it removes what nobody uses any more."""
    script = SCRIPT.replace("range(120)", "range(1)").replace("store.close()", "import os; os._exit(9)")
    arguments = [sys.executable, "-c", script, str(tmp_path), "0", str(9 * FILE)]
    crashed = subprocess.run(arguments, input="\n", text=True, check=False, timeout=60, stdout=subprocess.PIPE)
    (left,) = tmp_path.iterdir()
    store = open_store(fingerprint=fingerprint)

    assert 9 == crashed.returncode
    assert (store.folder == left) == (store.load(key(0), 32) == payload(0)) == left.exists()


def test_folders_in_use_stay(open_store):
    """Two models can run on one host."""
    left = open_store(fingerprint=b"g" * 32)
    left.save(key(1), 32, payload(1))
    open_store()

    assert payload(1) == left.load(key(1), 32)


def test_a_folder_that_is_not_private_is_refused(open_store, tmp_path):
    """Others could read prompts from it, or lead the store elsewhere."""
    name = open_store().folder.name.replace("66", "67", 12)
    (tmp_path / name).mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        open_store(fingerprint=b"g" * 32)
    (tmp_path / name).rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        open_store(fingerprint=b"g" * 32)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir(mode=0o700)
    give_away(tmp_path / name)
    with pytest.raises(PermissionError):
        open_store(fingerprint=b"g" * 32)


@dataclass
class Plan:
    state_position: int | None


def newest(states):
    """Plan to start from the newest state."""
    return Plan(next((position for position in (64, 48, 32, 16) if position in states), None))


def test_a_damaged_state_leads_to_the_next_plan(open_store):
    """The plan is made again without it, down to none."""
    store = open_store()
    keys = [key(n) for n in range(1, 5)]
    store.save(key(2), 32, payload(2))
    store.save(key(3), 48, payload(3))
    assert (Plan(48), payload(3)) == store.find_start(keys, newest)
    assert (Plan(32), payload(2)) == store.find_start(keys[:2], newest)
    (store.folder / f"{key(3).hex()}.48.whole").write_bytes(b"x")
    assert (Plan(32), payload(2)) == store.find_start(keys, newest)
    (store.folder / f"{key(2).hex()}.32.whole").write_bytes(b"x")

    assert (Plan(None), None) == store.find_start(keys, newest)
    assert (3, 1, 2) == (store.counts.num_hits, store.counts.num_misses, store.counts.num_damaged)


async def test_the_worker_finds_what_was_saved_before(open_store):
    """Saves and searches keep their order, and closing writes what waits."""
    store, other = open_store(), open_store()
    worker = WindowWorker(store)
    assert worker.has_room(STATE)
    worker.save(key(1), 16, payload(1))
    assert (Plan(16), payload(1)) == await worker.find_start([key(1)], newest)
    worker.save(key(2), 32, payload(2))
    await worker.close()

    assert payload(2) == other.load(key(2), 32)
    assert not worker.has_room(STATE)
    worker.save(key(3), 48, payload(3))  # the engine may be a moment late
    assert other.load(key(3), 48) is None


async def test_the_worker_holds_little(open_store):
    """When files are behind, states are dropped and counted; one may always wait."""
    worker = WindowWorker(open_store(), max_pending_bytes=2 * STATE)
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    worker._thread.submit(lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10))
    for n in range(2):
        assert worker.has_room(STATE)
        worker.save(key(n), 16, payload(n))
    assert not worker.has_room(STATE)
    assert 1 == worker.store.counts.num_dropped
    gate.set()
    await worker.flush()
    assert worker.has_room(10 * STATE)
    await worker.close()
