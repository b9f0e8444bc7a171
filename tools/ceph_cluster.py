"""Does an object store on 10+2 erasure coding keep every byte when two of twelve disks are gone?

Builds a Ceph cluster from the distribution's packages on this machine: a monitor, a manager, twelve OSDs on files in
one folder, an S3 gateway. For proofs and for trying things out: on loopback only, with an S3 key that everybody knows.

    apt-get install ceph-mon ceph-osd ceph-mgr ceph-common radosgw
    python -m tools.ceph_cluster prove --folder /var/tmp/ceph     # about five minutes on two cores
    python -m tools.ceph_cluster up --folder /var/tmp/ceph        # stays until Ctrl-C and says where its S3 is
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

NUM_OSDS = 12
DATA_CHUNKS, PARITY_CHUNKS = 10, 2
DATA_POOL = "default.rgw.buckets.data"
BUCKET = "fathom"
ACCESS_KEY, SECRET_KEY = "fathom", "fathom-on-loopback"
STORED_PER_LOGICAL = (1.19, 1.21)
"""10+2 stores 1.2 bytes a byte. Replicas would store 2 or 3: survival alone does not prove the coding."""
NUM_OBJECTS, OBJECT_BYTES = 24, 16 << 20
PROGRAMS = ("ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "radosgw-admin", "ceph", "monmaptool", "ceph-authtool")

_CONF = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
ms bind msgr1 = false
public addr = 127.0.0.1
keyring = {folder}/keyring
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = {folder}/log/$name.log
crash dir = {folder}/run
mon data = {folder}/mon
mgr data = {folder}/mgr
osd data = {folder}/osd$id
rgw data = {folder}/rgw
osd crush chooseleaf type = 0
osd pool default size = 4
osd pool default min size = 2
osd pool default pg num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon osd down out interval = 3600
mon osd min down reporters = 1
mon warn on insecure global id reclaim = false
mon warn on insecure global id reclaim allowed = false
mon data avail warn = 2
mon data avail crit = 1
osd heartbeat interval = 2
osd heartbeat grace = 8
bluestore block size = {osd_bytes}
bluestore cache autotune = false
bluestore cache size = 33554432
osd op num shards = 1
osd op num threads per shard = 2
rgw frontends = beast endpoint=127.0.0.1:{s3_port}
rgw thread pool size = 16
"""


class ProofFailedError(Exception):
    """The cluster did not do what was promised of it."""


@dataclass(slots=True)
class Cluster:
    """Daemons of one cluster, all children of this process."""

    folder: Path
    mon_port: int
    s3_port: int
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "ceph.conf"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.s3_port}"

    def start(self, name: str, *command: str) -> None:
        """Run a daemon in the foreground, as a child with its output in the log folder."""
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            self.children[name] = subprocess.Popen(
                [*command, "-c", str(self.conf), "-f"], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def start_osd(self, number: int) -> None:
        self.start(f"osd{number}", "ceph-osd", "-i", str(number))

    def kill(self, name: str) -> None:
        """End a daemon as a power cut would."""
        child = self.children.pop(name)
        child.kill()
        child.wait(30)

    def ask(self, *words: str, program: str = "ceph", timeout_seconds: float = 60) -> str:
        """Run one command against the cluster and return what it prints; raise ProofFailedError with its last words."""
        command = [program, "-c", str(self.conf), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
        if done.returncode:
            raise ProofFailedError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def store(self, *, timeout_seconds: float = 60.0) -> S3Store:
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": f"{timeout_seconds:g}s"},
            retry_config={"max_retries": 0},
        )

    def stop(self) -> None:
        for child in self.children.values():
            child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for child in self.children.values():
            try:
                child.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)


@contextlib.contextmanager
def running_cluster(folder: Path, *, osd_bytes: int) -> Iterator[Cluster]:
    """Build a cluster in `folder`, which must not exist yet, and remove both at the end."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        packages = "ceph-mon ceph-osd ceph-mgr ceph-common radosgw"
        raise SystemExit(
            f"not installed: {', '.join(missing)}; fix: apt-get install --no-install-recommends {packages}"
        )
    folder.mkdir(parents=True)
    for name in ("run", "log", "mon", "mgr", "rgw"):
        (folder / name).mkdir()
    cluster = Cluster(folder, mon_port=_free_port(), s3_port=_free_port())
    fsid = str(uuid.uuid4())
    cluster.conf.write_text(
        _CONF.format(
            fsid=fsid, folder=folder, mon_port=cluster.mon_port, s3_port=cluster.s3_port, osd_bytes=osd_bytes
        ).lstrip()
    )
    try:
        _build(cluster, fsid)
        yield cluster
    except ProofFailedError:
        _say(f"the logs stay in {folder / 'log'}")
        raise
    else:
        shutil.rmtree(folder)
    finally:
        cluster.stop()


def _build(cluster: Cluster, fsid: str) -> None:
    _say("starting a monitor and a manager")
    monmap = str(cluster.folder / "monmap")
    address = f"[v2:127.0.0.1:{cluster.mon_port}]"
    cluster.ask("--create", "--fsid", fsid, "--addv", "a", address, monmap, program="monmaptool")
    keyring = str(cluster.folder / "keyring")
    _make_keyring(cluster, keyring)
    cluster.ask("--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring, program="ceph-mon")
    cluster.start("mon", "ceph-mon", "-i", "a")
    cluster.start("mgr", "ceph-mgr", "-i", "x")
    for number in range(NUM_OSDS):
        _say(f"making OSD {number + 1} of {NUM_OSDS}")
        osd_id = str(uuid.uuid4())
        (cluster.folder / f"osd{number}").mkdir()
        cluster.ask("osd", "new", osd_id, str(number))
        cluster.ask("-i", str(number), "--mkfs", "--osd-uuid", osd_id, program="ceph-osd", timeout_seconds=300)
        cluster.start_osd(number)
    _until("all OSDs are up", lambda: _num_up(cluster) == NUM_OSDS)
    profile = ("k=10", "m=2", "plugin=isa", "crush-failure-domain=osd")
    cluster.ask("osd", "erasure-code-profile", "set", "ten-two", *profile)
    cluster.ask("osd", "pool", "create", DATA_POOL, "16", "16", "erasure", "ten-two")
    cluster.ask("osd", "pool", "set", DATA_POOL, "min_size", str(DATA_CHUNKS))
    cluster.ask("osd", "pool", "application", "enable", DATA_POOL, "rgw")
    _until("the erasure-coded pool is active", lambda: _is_pool_active(cluster))
    _say("starting the S3 gateway")
    user = ("user", "create", "--uid=fathom", "--display-name=Fathom")
    keys = (f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
    cluster.ask(*user, *keys, program="radosgw-admin", timeout_seconds=300)
    cluster.start("rgw", "radosgw", "-n", "client.rgw")
    _until("the gateway answers", lambda: _answers(cluster.s3_port))
    _make_bucket(cluster)


def _make_keyring(cluster: Cluster, keyring: str) -> None:
    """One key for each daemon, in one file: the monitor takes them over when it is made."""
    everything = [word for kind in ("mon", "osd", "mgr") for word in ("--cap", kind, "allow *")]
    cluster.ask("--create-keyring", keyring, program="ceph-authtool")
    for name in ("mon.", "client.admin", "client.rgw", "mgr.x", *(f"osd.{n}" for n in range(NUM_OSDS))):
        cluster.ask(keyring, "--gen-key", "-n", name, *everything, program="ceph-authtool")


def prove(cluster: Cluster) -> None:
    """Write, lose two OSDs, read and write, lose a third, restart it, read. Raises ProofFailedError."""
    objects = {f"proof/{n:03}": secrets.token_bytes(OBJECT_BYTES) for n in range(NUM_OBJECTS)}
    store = cluster.store()
    _say(f"writing {NUM_OBJECTS} objects of {OBJECT_BYTES >> 20} MiB")
    for name, payload in objects.items():
        obstore.put(store, name, payload)
    stored, logical = _until_counted(cluster, NUM_OBJECTS * OBJECT_BYTES)
    ratio = stored / logical
    _report(stored_bytes=stored, logical_bytes=logical, stored_per_logical=round(ratio, 3))
    if not STORED_PER_LOGICAL[0] <= ratio <= STORED_PER_LOGICAL[1]:
        raise ProofFailedError(f"stored/logical is {ratio:.3f}: this pool is not coded 10+2")

    for number in (3, 8):
        cluster.kill(f"osd{number}")
    _say("killed OSDs 3 and 8")
    _until("the monitor has noticed", lambda: _num_up(cluster) == NUM_OSDS - 2)
    num_equal = sum(_digest_of(store, name) == hashlib.sha256(payload).digest() for name, payload in objects.items())
    late = secrets.token_bytes(OBJECT_BYTES)
    obstore.put(store, "proof/late", late)
    is_late_equal = _digest_of(store, "proof/late") == hashlib.sha256(late).digest()
    _report(osds_lost=2, objects_read_equal=num_equal, objects=NUM_OBJECTS, written_while_degraded=is_late_equal)
    if num_equal != NUM_OBJECTS or not is_late_equal:
        raise ProofFailedError("bytes differ after losing two OSDs")

    cluster.kill("osd5")
    _say("killed OSD 5 too: more than the code can bear")
    _until("the monitor has noticed", lambda: _num_up(cluster) == NUM_OSDS - 3)
    outcomes = [_read_or_refuse(cluster, name, payload) for name, payload in list(objects.items())[:3]]
    _report(osds_lost=3, outcomes=outcomes)
    if "wrong" in outcomes:
        raise ProofFailedError("wrong bytes were served after losing three OSDs")
    cluster.start_osd(5)
    _until("OSD 5 is back", lambda: _num_up(cluster) == NUM_OSDS - 2)
    _until("its objects can be read again", lambda: _is_readable(cluster, objects))
    _report(osds_lost=2, after_restart="equal")


def _is_readable(cluster: Cluster, objects: dict[str, bytes]) -> bool:
    return all(_read_or_refuse(cluster, name, payload) == "equal" for name, payload in list(objects.items())[:3])


def _read_or_refuse(cluster: Cluster, name: str, payload: bytes) -> str:
    try:
        found = bytes(obstore.get(cluster.store(timeout_seconds=10.0), name).bytes())
    except BaseError:
        return "refused"
    return "equal" if found == payload else "wrong"


def _digest_of(store: S3Store, name: str) -> bytes:
    return hashlib.sha256(obstore.get(store, name).bytes()).digest()


def _until_counted(cluster: Cluster, expected_bytes: int) -> tuple[int, int]:
    """Wait until the pool's statistics have caught up; return (bytes on disks, bytes of objects)."""

    def counted() -> tuple[int, int]:
        pools = json.loads(cluster.ask("df", "detail", "--format", "json"))["pools"]
        stats = next(pool["stats"] for pool in pools if pool["name"] == DATA_POOL)
        return int(stats["bytes_used"]), int(stats["stored"])

    _until("the statistics are complete", lambda: counted()[1] >= expected_bytes)
    time.sleep(6)  # OSDs report every five seconds: let the last one speak
    return counted()


def _num_up(cluster: Cluster) -> int:
    return int(json.loads(cluster.ask("osd", "stat", "--format", "json"))["num_up_osds"])


def _is_pool_active(cluster: Cluster) -> bool:
    listed = json.loads(cluster.ask("pg", "ls-by-pool", DATA_POOL, "--format", "json"))["pg_stats"]
    return bool(listed) and all("active" in group["state"] for group in listed)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _make_bucket(cluster: Cluster) -> None:
    """PUT the bucket itself; obstore only knows objects."""
    from urllib import request

    from tools.s3_signature import signed_headers

    url = f"{cluster.endpoint}/{BUCKET}"
    headers = signed_headers("PUT", url, access_key=ACCESS_KEY, secret_key=SECRET_KEY, now=time.gmtime())
    with request.urlopen(request.Request(url, method="PUT", headers=headers), timeout=120):  # noqa: S310 - our own
        pass


def _until(what: str, is_so: object, *, seconds: float = 300) -> None:
    assert callable(is_so)
    deadline = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                break
        except (ProofFailedError, subprocess.TimeoutExpired) as error:
            _say(f"still waiting: {str(error)[-120:]}")
        if time.monotonic() > deadline:
            raise ProofFailedError(f"{seconds:g} s passed before {what}")
        time.sleep(1)
    _say(what)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.ceph_cluster", description=__doc__)
    parser.add_argument("command", choices=("prove", "up"))
    parser.add_argument(
        "--folder", type=Path, required=True, help="made, used and removed; a short path: sockets lie in it"
    )
    parser.add_argument("--osd-bytes", type=int, default=4 << 30, help="size of each OSD's (sparse) file")
    words = parser.parse_args()
    try:
        with running_cluster(words.folder.absolute(), osd_bytes=words.osd_bytes) as cluster:
            if words.command == "prove":
                prove(cluster)
                return
            print(f"S3 at {cluster.endpoint}, bucket {BUCKET}, key {ACCESS_KEY}, secret {SECRET_KEY}; Ctrl-C ends it")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    except ProofFailedError as error:
        raise SystemExit(f"failed: {error}") from None


if __name__ == "__main__":
    main()
