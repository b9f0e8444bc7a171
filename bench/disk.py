"""What does this disk give to a program that does nothing else? Needs fio; figures without it have no yardstick."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

MEBIBYTE = 1 << 20


def fio_write_rate(folder: Path, *, block_bytes: int, depth: int, total_bytes: int) -> float | None:
    """Return fio's MiB/s past the page cache in that folder, an fsync at the end included; None without fio.

    The file is made and removed.
    """
    path = folder / "yardstick"
    size = total_bytes // block_bytes * block_bytes
    try:
        return _rate(path, "write", block_bytes=block_bytes, depth=depth, size=str(size), end_fsync="1")
    finally:
        path.unlink(missing_ok=True)


def fio_read_rate(path: Path, *, block_bytes: int, depth: int) -> float | None:
    """Return fio's MiB/s past the page cache over a file that is there; None without fio."""
    size = path.stat().st_size // block_bytes * block_bytes
    return _rate(path, "read", block_bytes=block_bytes, depth=depth, size=str(size), allow_file_create="0")


def _rate(path: Path, direction: str, *, block_bytes: int, depth: int, **more: str) -> float | None:
    if shutil.which("fio") is None:
        return None
    words = {
        "name": "yardstick",
        "filename": str(path),
        "bs": str(block_bytes),
        "iodepth": str(depth),
        "ioengine": "libaio",
        "direct": "1",
        "rw": direction,
        "output-format": "json",
        **more,
    }
    command = ["fio", *(f"--{name}={value}" for name, value in words.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"]) / MEBIBYTE
