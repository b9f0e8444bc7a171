"""Does `fathom keys` make keys that work, show them once, and lose none?"""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from services.local import keys
from services.local.commands import app
from services.recipe.keys import ApiKey, KeyFile, Keyring, parse_keys


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".fathom" / "keys.json"


def ring(file: Path) -> Keyring:
    return Keyring(parse_keys(file.read_bytes()).keys)


def test_a_new_key_works_and_is_shown_once(home: Path) -> None:
    """The last line is the key; the file, which others cannot read, knows its hash alone."""
    made = run(
        *("new", "--tenant", "acme", "--model", "a", "--model", "b", "--requests-per-minute", "60"),
        *("--input-tokens-per-minute", "1000", "--max-concurrency", "3", "--priority", "-5", "--retention", "agent"),
    )
    whole = made.stdout.splitlines()[-1]
    assert f"fathom up --set recipe.keys_file={home}\n" in made.stderr
    key = ring(home).find(whole)

    assert key == ApiKey(
        id=whole[3:15],
        secret_sha256=json.loads(home.read_text())["keys"][0]["secret_sha256"],
        tenant="acme",
        models=("a", "b"),
        requests_per_minute=60,
        input_tokens_per_minute=1000,
        max_concurrency=3,
        priority=-5,
        retention="agent",
    )
    assert 0o600 == stat.S_IMODE(home.stat().st_mode)
    assert whole.partition("_")[2] not in home.read_text() + run("list").output


def test_listing_shows_what_each_may_do(home: Path) -> None:
    """One line a key."""
    run("new", "--tenant", "acme", "--requests-per-minute", "60")
    run("new", "--tenant", "other", "--any-retention")
    text = run("list").output

    for word in ("acme", "60", "other", "chat agent", *(key.id for key in parse_keys(home.read_bytes()).keys)):
        assert word in text


def test_a_narrow_terminal_shows_whole_ids(home: Path) -> None:
    """They are what `revoke` wants."""
    run("new", "--tenant", "a-tenant-of-a-long-name", "--requests-per-minute", "60", "--any-retention")
    written, shown = parse_keys(home.read_bytes()).keys, StringIO()
    Console(width=80, file=shown).print(keys._table(written))

    assert written[0].id in shown.getvalue()


def test_revoking_takes_one_key_out(home: Path) -> None:
    """By id or by the whole key; the others stay, and so do the file's rights."""
    wholes = [run("new", "--tenant", "t").stdout.splitlines()[-1] for _ in range(3)]
    home.chmod(0o640)

    assert 0 == run("revoke", wholes[0][3:15]).exit_code
    assert 0 == run("revoke", wholes[1]).exit_code
    assert [False, False, True] == [ring(home).find(whole) is not None for whole in wholes]
    assert 0o640 == stat.S_IMODE(home.stat().st_mode)
    assert 1 == run("revoke", "abc").exit_code


def test_two_at_once_lose_nothing(home: Path) -> None:
    """Each adds to what the other wrote; readers see whole files alone, and no draft stays behind."""

    def add(i: int) -> None:
        with keys._locked(home):
            there = keys._read(home, must_exist=False).keys
            keys._write(home, KeyFile(keys=(*there, ApiKey(id=f"k{i}", secret_sha256="0" * 64, tenant="t"))))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(12)))

    assert 12 == len(ring(home))
    assert ["keys.json", "keys.json.lock"] == sorted(path.name for path in home.parent.iterdir())


def test_a_broken_file_is_not_written_over(home: Path) -> None:
    """Somebody's keys are in it."""
    home.parent.mkdir()
    home.write_text("{")

    for command in (("new", "--tenant", "t"), ("list",), ("revoke", "a")):
        assert 1 == run(*command).exit_code
    assert "{" == home.read_text()


def test_what_cannot_be_is_said(home: Path) -> None:
    """A tenant is a plain word; without a file there is nothing to list; another file is used where it is named."""
    assert "is no tenant" in run("new", "--tenant", "a b").output
    assert "fathom keys new" in run("list").output
    assert 0 == run("new", "--tenant", "t", "--file", "elsewhere/k.json").exit_code
    assert not home.exists()
    assert 1 == len(ring(Path("elsewhere/k.json")))
