"""Does the folder keep what must be kept?"""

import os
from pathlib import Path

from services.local.home import Home


def test_the_cluster_key_is_made_once_and_private(tmp_path: Path) -> None:
    """A second `up` uses the same key, or stored KV would never be found again."""
    home = Home.of(tmp_path)
    key = home.cluster_key()

    assert key == Home.of(tmp_path).cluster_key()
    assert 32 == len(bytes.fromhex(key))
    assert 0o600 == (home.root / "cluster_key").stat().st_mode & 0o777


def test_one_suite_at_a_time_owns_a_directory(tmp_path: Path) -> None:
    """The lock is refused while it is held, and free once its holder is gone."""
    home = Home.of(tmp_path)
    held = home.lock()

    assert held is not None
    assert home.lock() is None
    os.close(held)
    again = home.lock()
    assert again is not None
    os.close(again)


def test_the_last_runs_logs_are_set_aside(tmp_path: Path) -> None:
    """A new run begins new logs, and the last run's can still be read."""
    home = Home.of(tmp_path)
    home.prepare()
    home.log("decode-0").write_text("old")

    home.prepare()

    assert not home.log("decode-0").exists()
    assert "old" == (home.logs / "decode-0.log.1").read_text()


def test_a_folder_that_cannot_be_looked_at_is_still_held(tmp_path: Path) -> None:
    """A disk that answers nothing for a moment ends no suite; a folder that is gone does."""
    home = Home.of(tmp_path / "deep")
    lock = home.lock()
    assert lock is not None
    aside = tmp_path / "aside"
    home.root.rename(aside)
    assert not home.is_held_by(lock)
    home.root.symlink_to(home.root)  # too many levels of links: neither there nor gone

    assert home.is_held_by(lock)
    home.root.unlink()
    aside.rename(home.root)
    assert home.is_held_by(lock)
    os.close(lock)
