"""Where does a suite on this machine keep its things?"""

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

KEPT_LOGS = ".1"


@dataclass(frozen=True, slots=True)
class Home:
    """The `.fathom` folder of one directory: everything `fathom` writes is inside, and nothing else is."""

    root: Path

    @classmethod
    def of(cls, directory: Path) -> "Home":
        return cls(directory.resolve() / ".fathom")

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def starting(self) -> Path:
        """Is there while a `fathom up` starts."""
        return self.root / "starting.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    @property
    def nats(self) -> Path:
        return self.root / "nats"

    @property
    def kv(self) -> Path:
        return self.root / "kv"

    def kv_of(self, name: str) -> Path:
        """Return the folder of one KV store replica; the first one's is `kv`, however many there are."""
        return self.kv if name == "kvstore-0" else self.root / name.replace("kvstore", "kv")

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def lock_file(self) -> Path:
        return self.root / "lock"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def prepare(self) -> None:
        """Make the folders, and set the last run's logs aside (one generation is kept)."""
        for folder in (self.logs, self.nats, self.kv):
            folder.mkdir(parents=True, exist_ok=True)
        for log in self.logs.glob("*.log"):
            log.replace(log.with_name(log.name + KEPT_LOGS))

    def cluster_key(self) -> str:
        """Return this directory's key (hex, 32 bytes); made once, so that stored KV stays findable, and private."""
        path = self.root / "cluster_key"
        if not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            # Written aside and linked into place: two first runs at once agree on one whole key.
            draft = path.with_name(f"cluster_key.{os.getpid()}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(draft, path)
            except FileExistsError:
                pass  # the other run's key is as good
            finally:
                draft.unlink()
        return path.read_text(encoding="ascii").strip()

    def lock(self) -> int | None:
        """Return a descriptor that owns this directory, or None while another suite owns it.

        The kernel frees the lock when the last holder of the descriptor ends, so a killed suite leaves no stale lock.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def is_held_by(self, lock: int) -> bool:
        """Return whether this is still the folder that `lock` was taken in, and not removed, moved or made anew.

        lock: any descriptor of the lock's file. Where the system does not tell, it counts as still the same: a disk
        that stutters must not end a suite, and whoever watches asks again.
        """
        try:
            return os.path.samestat(os.fstat(lock), self.lock_file.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
