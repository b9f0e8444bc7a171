"""Which weights are these? SHA-256 over the weight files, remembered beside them.

No torch: `fathom pull` checks its cached folder with this before anything heavy is imported.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""(stage, done, total), called often; total is in the unit of done."""

SIDECAR = ".fathom-digest.json"
_TAG = b"fathom.weights.1"
_CHUNK_BYTES = 8 << 20


def files_digest(files: Sequence[Path], progress: Progress | None = None) -> bytes:
    """SHA-256 (32 bytes) that names these files' contents, whatever folder they lie in.

    Hashing reads every byte, so the result is kept in a hidden file beside the weights, keyed by size and modification
    time, when that folder is writable.
    """
    ordered = sorted(files, key=lambda file: file.name)
    total = sum(file.stat().st_size for file in ordered)
    digest = hashlib.sha256(_TAG)
    done = 0
    for file in ordered:
        digest.update(_file_digest(file, done, total, progress))
        done += file.stat().st_size
    return digest.digest()


def _file_digest(file: Path, done: int, total: int, progress: Progress | None) -> bytes:
    status = file.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    known = _read_sidecar(file.parent)
    entry = known.get(file.name)
    if isinstance(entry, list) and entry[:2] == stamp:
        return bytes.fromhex(entry[2])
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress("hash weights", done, total)
    # A file that was written to meanwhile gets a new stamp, so the next reader hashes it again.
    _write_sidecar(file.parent, known | {file.name: [*stamp, digest.hexdigest()]})
    return digest.digest()


def _read_sidecar(folder: Path) -> dict[str, object]:
    try:
        known = json.loads((folder / SIDECAR).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_sidecar(folder: Path, known: dict[str, object]) -> None:
    """Replace the sidecar at once; a read-only folder simply goes without."""
    with suppress(OSError):
        draft = folder / f"{SIDECAR}.{os.getpid()}"
        draft.write_text(json.dumps(known))
        draft.replace(folder / SIDECAR)
