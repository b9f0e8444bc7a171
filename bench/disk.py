"""What does this disk give to a program that does nothing else? Needs fio; figures without it have no yardstick."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

MEBIBYTE = 1 << 20


def fio_rate(folder: Path, direction: str, *, block_bytes: int, depth: int, total_bytes: int) -> float | None:
    """Return fio's MiB/s past the page cache in that folder; None where fio is not installed.

    direction: "read" or "write"; writes end with an fsync. The file is made, used and removed.
    """
    if shutil.which("fio") is None:
        return None
    size = total_bytes // block_bytes * block_bytes
    words = {
        "name": "yardstick",
        "directory": str(folder),
        "size": str(size),
        "bs": str(block_bytes),
        "iodepth": str(depth),
        "ioengine": "libaio",
        "direct": "1",
        "rw": direction,
        "end_fsync": "1" if direction == "write" else "0",
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in words.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    finally:
        for path in folder.glob("yardstick.*"):
            path.unlink()
    return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"]) / MEBIBYTE
