"""Promises of keys and their file: who is known, what a wrong file says, how changes arrive."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.chassis.config import check, child_environment
from services.recipe.config import RecipeSettings
from services.recipe.keys import ApiKey, Keyring, KeysFileError, new_key, parse_keys
from services.recipe.keys_watch import KeyWatch


def entry(**fields: Any) -> tuple[str, dict[str, Any]]:
    """A key as its holder has it, and as it stands in the file."""
    key_id, whole, secret_sha256 = new_key()
    return whole, {"id": key_id, "secret_sha256": secret_sha256, "tenant": "acme"} | fields


def file_of(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"keys": entries}).encode()


def test_only_the_whole_key_is_known() -> None:
    """Not its id, not another's secret, not a longer or shorter one."""
    mine, my_entry = entry()
    other, other_entry = entry()
    ring = Keyring(parse_keys(file_of(my_entry, other_entry)).keys)
    found = ring.find(mine)

    assert found is not None
    assert my_entry["id"] == found.id
    head, _, secret = mine.partition("_")
    for wrong in ("", "sk-", head, f"{head}_", f"{head}_{other.partition('_')[2]}", mine + "a", mine[:-1], secret):
        assert ring.find(wrong) is None
    for wrong in (mine.upper(), f" {mine}", f"{mine}\n", "sk-" + "a" * 100_000, my_entry["secret_sha256"]):
        assert ring.find(wrong) is None


def test_two_keys_are_never_alike() -> None:
    """Each has 256 random bits, and the file's hash is not the secret."""
    made = {new_key() for _ in range(100)}

    assert 100 == len({key_id for key_id, _, _ in made})
    assert all(len(whole) > 50 and hashed not in whole for _, whole, hashed in made)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "the file"),
        (b"[]", "the file"),
        (b'{"keys": {}}', "keys: "),
        (b'{"keys": [], "more": 1}', "more: "),
        (file_of(entry(tenant="")[1]), "keys[0].tenant"),
        (file_of(entry(tenant="a b")[1]), "keys[0].tenant"),
        (file_of(entry()[1], entry(id="A")[1]), "keys[1].id"),
        (file_of(entry(secret_sha256="hunter2")[1]), "keys[0].secret_sha256"),
        (file_of(entry(requests_per_minute=0)[1]), "keys[0].requests_per_minute"),
        (file_of(entry(requests_per_minute="5")[1]), "keys[0].requests_per_minute"),
        (file_of(entry(retention="forever")[1]), "keys[0].retention"),
        (file_of(entry(rpm=5)[1]), "keys[0].rpm"),
        (file_of(*[entry(id="aa")[1]] * 2), "twice"),
        (b" " * (4 << 20) + b"{}", "larger"),
    ],
    ids=range(14),  # keys are drawn anew in every process; test names must not be
)
def test_a_wrong_file_says_where_and_shows_nothing(text: bytes, says: str) -> None:
    """A misspelt limit must not be a limit that is silently missing."""
    with pytest.raises(KeysFileError) as raised:
        parse_keys(text)

    assert says in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_models_and_retention_are_what_the_key_allows() -> None:
    """No models: all; its own retention always, others when listed."""
    plain = ApiKey(id="a", secret_sha256="0" * 64, tenant="t")
    narrow = plain.model_copy(update={"models": ("m",), "retention": "agent", "allowed_retentions": ("chat",)})

    assert [True, True, False] == [plain.may_use("x"), narrow.may_use("m"), narrow.may_use("x")]
    assert [True, False, True, True] == [key.may_keep(r) for key in (plain, narrow) for r in ("chat", "agent")]


async def test_changes_arrive_and_broken_files_do_not(tmp_path: Path) -> None:
    """An added key works, a revoked one ends; a file that is broken or away leaves the last good keys in force."""
    first, first_entry = entry()
    second, second_entry = entry()
    path, metrics = tmp_path / "keys.json", CollectorRegistry()
    path.write_bytes(file_of(first_entry))
    watch = KeyWatch(path, metrics)

    def known() -> tuple[bool, bool]:
        return watch.keyring.find(first) is not None, watch.keyring.find(second) is not None

    def broken() -> float | None:
        return metrics.get_sample_value("fathom_recipe_keys_file_broken")

    assert (True, False) == known()
    path.write_bytes(file_of(first_entry, second_entry))
    await watch.refresh()
    assert (True, True) == known()
    for wrong in (b'{"keys": [', b"", None):
        path.unlink() if wrong is None else path.write_bytes(wrong)
        await watch.refresh()
        assert ((True, True), 1.0) == (known(), broken())
    path.write_bytes(file_of(second_entry))
    await watch.refresh()
    assert ((False, True), 0.0) == (known(), broken())


async def test_a_mounted_secret_is_followed(tmp_path: Path) -> None:
    """Kubernetes swaps a link beside the file; contents of equal length and age count as well."""
    first, first_entry = entry()
    second, second_entry = entry()
    for name, one in (("v1", first_entry), ("v2", second_entry)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.json").write_bytes(file_of(one))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    watch = KeyWatch(tmp_path / "keys.json", CollectorRegistry())
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    await watch.refresh()

    assert watch.keyring.find(first) is None
    assert watch.keyring.find(second) is not None


@pytest.mark.parametrize("text", [None, b"{"])
def test_no_keys_to_begin_with_is_an_error(tmp_path: Path, text: bytes | None) -> None:
    """There is nothing good to keep."""
    path = tmp_path / "keys.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(KeysFileError, match="keys"):
        KeyWatch(path, CollectorRegistry())


@pytest.mark.slow
def test_a_recipe_without_good_keys_ends(tmp_path: Path) -> None:
    """With status 78, as for every bad setting, and the reason where people and launchers look for it."""
    path = tmp_path / "keys.json"
    path.write_bytes(b'{"keys": [{"id": "a"}]}')
    settings = {"model": str(tmp_path), "entrypoint_address": "127.0.0.1:1", "keys_file": str(path)}
    command = (sys.executable, "-m", "services.recipe")
    ended = subprocess.run(
        command, env=child_environment("recipe", settings), capture_output=True, timeout=60, check=False
    )

    assert 78 == ended.returncode
    assert b"bad settings\n  FATHOM_RECIPE_KEYS_FILE: " in ended.stderr
    assert b"keys[0].tenant" in ended.stderr


@pytest.mark.parametrize(
    ("listen", "is_safe"),
    [
        ("127.0.0.1:8000", True),
        ("127.9.9.9:1", True),
        ("[::1]:8000", True),
        ("localhost:8000", True),
        ("0.0.0.0:8000", False),
        ("[::]:8000", False),
        ("10.0.0.1:8000", False),
        ("api.example:80", False),
    ],
)
def test_strangers_need_keys(listen: str, is_safe: bool) -> None:
    """Off loopback there is no start without a key file; the setting at fault is named."""
    given = {
        "FATHOM_RECIPE_MODEL": "/models/x",
        "FATHOM_RECIPE_ENTRYPOINT_ADDRESS": "e:1",
        "FATHOM_RECIPE_PUBLIC_LISTEN": listen,
    }
    settings, problems = check(RecipeSettings, given)
    with_keys, none = check(RecipeSettings, given | {"FATHOM_RECIPE_KEYS_FILE": "/keys/keys.json"})

    assert is_safe == (settings is not None)
    assert is_safe or problems[0].startswith("FATHOM_RECIPE_KEYS_FILE: ")
    assert with_keys is not None
    assert [] == none
