"""Are wrong settings refused with everything one needs to mend them?"""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, SecretStr, ValidationError

from services.chassis.config import (
    ServiceSettings,
    check,
    child_environment,
    load,
    replica_name,
    settings_config,
    settings_table,
)
from services.chassis.service import run
from services.chassis.tests.probe_service import ProbeSettings, build


class Settings(ServiceSettings):
    service = "prefill"
    model_config = settings_config("prefill")

    model: Path
    """Folder of the model."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Number format."""

    key: SecretStr = Field(default=SecretStr("none"), min_length=4)
    """A secret."""

    tiers: tuple[int, ...] = ()
    """Length tiers."""


def test_every_problem_is_listed_at_once() -> None:
    """Unknown names, bad values and missing ones come in one message, secrets unseen."""
    settings, problems = check(
        Settings, {"FATHOM_PREFILL_NODEL": "/m", "FATHOM_PREFILL_DTYPE": "fp8", "FATHOM_PREFILL_KEY": "abc"}
    )
    text = "\n".join(problems)

    assert settings is None
    assert 4 == len(problems)
    assert "FATHOM_PREFILL_NODEL: no such setting" in text
    assert "FATHOM_PREFILL_DTYPE" in text
    assert "'fp8'" in text
    assert "FATHOM_PREFILL_MODEL" in text
    assert "FATHOM_PREFILL_KEY" in text
    assert "abc" not in text


def test_names_of_a_service_with_a_longer_name_are_not_ours() -> None:
    """FATHOM_PREFILL_LB_* belongs to prefill_lb and is no mistake in prefill's environment."""
    settings, problems = check(Settings, {"FATHOM_PREFILL_MODEL": "/m", "FATHOM_PREFILL_LB_LISTEN": "x"})

    assert [] == problems
    assert settings is not None


def test_settings_are_frozen() -> None:
    settings, _ = check(Settings, {"FATHOM_PREFILL_MODEL": "/m"})
    assert settings is not None

    with pytest.raises(ValidationError):
        settings.model = Path("/other")


def test_what_the_launcher_encodes_the_child_decodes() -> None:
    """Paths, numbers, lists, secrets and booleans survive the environment; no inherited FATHOM_ name does."""
    given = {
        "model": Path("/m"),
        "tiers": (0, 2),
        "key": SecretStr("abcd"),
        "drain_seconds": 1.5,
        "replica": "p-1",
        "dtype": None,
    }
    environment = child_environment(
        "prefill", given, base={"PATH": "/bin", "FATHOM_PREFILL_JUNK": "1"}, extra={"OMP_NUM_THREADS": "1"}
    )

    settings, problems = check(Settings, environment)

    assert [] == problems
    assert settings is not None
    assert ("/bin", "1") == (environment["PATH"], environment["OMP_NUM_THREADS"])
    assert (Path("/m"), (0, 2), "abcd") == (settings.model, settings.tiers, settings.key.get_secret_value())
    assert (1.5, "p-1", "bf16") == (settings.drain_seconds, replica_name(settings), settings.dtype)


def test_the_table_explains_each_setting_and_shows_no_secret() -> None:
    table = settings_table(Settings)

    assert "FATHOM_PREFILL_MODEL  [path, required]\n      Folder of the model." in table
    assert "[bf16|fp32" in table
    assert "FATHOM_PREFILL_LISTEN" in table
    assert "host:port of the gRPC server" in table


def test_a_process_with_bad_settings_exits_78_and_says_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor sees 78, the reader every problem and every allowed name."""
    monkeypatch.setenv("FATHOM_VISION_LISTEN", "nonsense")
    monkeypatch.setenv("FATHOM_VISION_PORT", "1")

    with pytest.raises(SystemExit) as stopped:
        load(ProbeSettings)

    said = capsys.readouterr().err
    assert 78 == stopped.value.code
    assert "FATHOM_VISION_PORT: no such setting" in said
    assert "FATHOM_VISION_LISTEN" in said
    assert "FATHOM_VISION_NATS_URL" in said


@pytest.mark.parametrize(
    ("arguments", "value", "code"),
    [
        (["--check-config"], "info", 0),
        (["--check-config"], "loud", 78),
        (["--help"], "loud", 0),
        (["--wrong"], "info", 78),
    ],
)
def test_check_config_and_help_start_nothing(
    arguments: list[str], value: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 for good settings, 78 for bad ones, and the table on request."""
    monkeypatch.setattr("sys.argv", ["vision", *arguments])
    monkeypatch.setenv("FATHOM_VISION_LOG_LEVEL", value)

    with pytest.raises(SystemExit) as stopped:
        run(ProbeSettings, build)

    said = capsys.readouterr()
    assert code == stopped.value.code
    assert (arguments != ["--check-config"] or code != 0) == ("FATHOM_VISION_LISTEN" in said.out + said.err)
