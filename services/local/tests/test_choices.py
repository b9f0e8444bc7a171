"""Is a bad choice refused in the words that were typed?"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.chassis.config import SERVICES
from services.local.choices import check_choices, check_environment, settings_of
from services.local.commands import app
from services.local.plan import WIRED, Options


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_its_own_settings(service: str) -> None:
    """The names we list are those of the service meant."""
    assert service == settings_of(service).service


@pytest.mark.parametrize(("service", "field"), [("nats", "x"), *(("decode", field) for field in sorted(WIRED))])
def test_what_holds_the_suite_together_cannot_be_set(service: str, field: str) -> None:
    """A setting that would take the suite apart is refused before anything starts."""
    with pytest.raises(ValueError, match=f"--set {service}.{field}=1: "):
        check_choices(Options(model=Path("/m"), settings=((service, field, "1"),)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"settings": (("decode", "max_bath", "8"),)}, r"--set decode.max_bath=8: no such setting; .*max_batch"),
        ({"settings": (("decode", "max_batch", "many"),)}, r"--set decode.max_batch=many: .*integer"),
        ({"settings": (("kvstore", "max_bytes", "1"),)}, r"--set kvstore.max_bytes=1: .*1048576"),
        ({"kv_bytes": 1}, r"--kv-bytes \(1 bytes\): at least 1M$"),
        ({"otlp_endpoint": "host:4317"}, r"--otlp-endpoint host:4317: no address .* for example http://127.0.0.1:4317"),
        ({"kv_url": "/srv/kv"}, r"--kv-url /srv/kv: no object store: write file:///FOLDER or s3://BUCKET/PREFIX, .*"),
    ],
)
def test_a_refusal_names_the_option_and_what_is_allowed(options, expected: str) -> None:
    """Nobody typed FATHOM_DECODE_MAX_BATCH, so nobody reads it."""
    with pytest.raises(ValueError, match=f"^{expected}[^\n]*$"):
        check_choices(Options(model=Path("/m"), **options))


def test_good_choices_pass() -> None:
    """What the services need besides is the launcher's business."""
    settings = (("decode", "max_batch", "8"), ("prefill_lb", "max_queued_tokens", "9"), ("recipe", "image_urls", "*"))
    check_choices(Options(model=Path("/m"), otlp_endpoint="http://127.0.0.1:4317", settings=settings))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FATHOM_DECODE_MAX_BATCH", "is not read by fathom up: write --set decode.max_batch=VALUE"),
        ("FATHOM_DECODE_MAX_BACTH", "did you mean --set decode.max_batch=VALUE? decode has "),
        ("FATHOM_PREFILL_LB_LOG_LEVEL", "write --set prefill_lb.log_level=VALUE"),
        ("FATHOM_RECIPE_LISTEN", "fathom up sets this one itself"),
        ("FATHOM_DECODER_X", "no such setting; names begin with FATHOM_RECIPE_, "),
    ],
)
def test_a_setting_in_the_environment_is_not_ignored_silently(name: str, expected: str) -> None:
    """Which name is wrong, and what to write instead."""
    with pytest.raises(ValueError, match="in the environment") as refused:
        check_environment([name])

    assert name in str(refused.value)
    assert expected in str(refused.value)
    check_environment([])


def test_up_refuses_settings_in_its_environment(tmp_path, monkeypatch) -> None:
    """Before anything is fetched or started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FATHOM_DECODE_MAX_BACTH", "8")
    refused = CliRunner().invoke(app, ["up"])

    assert 1 == refused.exit_code
    assert "--set decode.max_batch=VALUE" in refused.output
    assert not list(tmp_path.iterdir())
