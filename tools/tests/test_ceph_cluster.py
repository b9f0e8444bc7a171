"""Does erasure coding keep what it promises, on a real cluster? Several minutes: `make soak`."""

import shutil
import sys
import time
from pathlib import Path
from subprocess import run
from tempfile import mkdtemp

import pytest

from tools.ceph_cluster import PROGRAMS
from tools.s3_signature import signed_headers

MISSING = [program for program in PROGRAMS if shutil.which(program) is None]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    bool(MISSING), reason=f"Ceph is not installed: {', '.join(MISSING)} (see docs/kvstore_operations.md)"
)
def test_two_of_twelve_disks_may_go() -> None:
    """10+2 stores 1.2 bytes a byte, keeps every byte and takes new ones without two disks, and never serves wrong ones."""
    folder = Path(mkdtemp(prefix="ceph-", dir="/var/tmp"))
    command = [sys.executable, "-m", "tools.ceph_cluster", "prove", "--folder", str(folder / "c")]
    done = run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    assert 0 == done.returncode, done.stderr[-2000:]


def test_a_request_is_signed_as_the_service_signs_it() -> None:
    """The signature is a function of method, address, time and keys, and names what it covers."""
    now = time.gmtime(1_369_353_600)
    one = signed_headers("PUT", "http://127.0.0.1:1/fathom", access_key="k", secret_key="s", now=now)
    other = signed_headers("PUT", "http://127.0.0.1:1/fathom", access_key="k", secret_key="t", now=now)

    assert "20130524T000000Z" == one["x-amz-date"]
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date" in one["authorization"]
    assert one["authorization"] != other["authorization"]
