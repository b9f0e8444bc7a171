"""Which settings does a service take, and are the ones in its environment right?"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: the supervisor need not retry
SERVICES = ("recipe", "entrypoint", "prefill_lb", "decode_lb", "prefill", "decode", "vision", "kvstore")

_ADDRESS = r"^[^\s:]+:\d{1,5}$|^\[[0-9a-fA-F:.%]+\]:\d{1,5}$"


class BadSettings(Exception):  # noqa: N818 - named by meaning, like the service errors
    """Settings that are well formed and cannot work here. Raised while a service builds itself, it ends with 78."""


def settings_config(service: str) -> SettingsConfigDict:
    """Return the `model_config` of a service's settings: frozen, strict about names, read from FATHOM_<SERVICE>_*."""
    return SettingsConfigDict(
        env_prefix=prefix(service),
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,
        protected_namespaces=(),  # `model` and `model_name` are our words
    )


def prefix(service: str) -> str:
    """Return the prefix of a service's environment names."""
    return f"FATHOM_{service.upper()}_"


class ServiceSettings(BaseSettings):
    """What every service can be told. A service adds at most six fields of its own."""

    service: ClassVar[str]
    model_config = settings_config("service")  # each subclass replaces it by its own

    listen: str = Field(default="127.0.0.1:0", pattern=_ADDRESS)
    """host:port of the gRPC server; port 0 takes a free one. Loopback, because calls are not authenticated."""

    metrics_listen: str = Field(default="127.0.0.1:0", pattern=_ADDRESS)
    """host:port of HTTP /metrics and /healthz."""

    advertise: str = Field(default="", pattern=rf"^$|{_ADDRESS}")
    """host:port that peers dial; empty means what `listen` became."""

    replica: str = Field(default="", pattern=r"^[A-Za-z0-9_-]*$")
    """Stable name of this replica; empty means <service>-0. Kubernetes sets the pod's name."""

    nats_url: str = Field(default="nats://127.0.0.1:4222", pattern=r"^(nats|tls)://\S+$")
    """NATS server, or several separated by commas."""

    otlp_endpoint: str = Field(default="", pattern=r"^$|^https?://\S+$")
    """OTLP/gRPC receiver of spans, for example http://127.0.0.1:4317; empty exports none."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is logged."""

    drain_seconds: float = Field(default=30.0, ge=0)
    """Time for running work to finish after SIGTERM, in seconds. Must stay below the pod's termination grace."""


T = TypeVar("T", bound=ServiceSettings)


def replica_name(settings: ServiceSettings) -> str:
    """Return the replica's stable name."""
    return settings.replica or f"{settings.service}-0"


def load(cls: type[T]) -> T:
    """Return the settings in the environment; print every problem and exit 78 if there is one."""
    settings, problems = check(cls, os.environ)  # noqa: TID251 - the one place that reads it
    if settings is None or problems:
        _refuse(cls, problems)
    return settings


def check(cls: type[T], environment: Mapping[str, str]) -> tuple[T | None, list[str]]:
    """Return the settings in `environment` and every problem found, a line each. Values of secrets are never shown."""
    start = prefix(cls.service)
    longer = tuple(prefix(s) for s in SERVICES if prefix(s).startswith(start) and s != cls.service)
    given = {
        name: value
        for name, value in environment.items()
        if name.upper().startswith(start) and not name.upper().startswith(longer)
    }
    values = {name.upper().removeprefix(start).lower(): value for name, value in given.items()}
    problems = [f"{start}{field.upper()}: no such setting" for field in sorted(set(values) - set(cls.model_fields))]
    known: dict[str, Any] = {
        field: _decode(cls, field, value) for field, value in values.items() if field in cls.model_fields
    }
    try:
        # The environment was read above, from the mapping given; pydantic-settings must not read it a second time.
        return cls(_env_prefix="\0", **known), problems
    except ValidationError as exc:
        for error in exc.errors():
            field = str(error["loc"][0]) if error["loc"] else ""
            name = f"{start}{field.upper()}" if field else start
            shown = f" (got {values[field]!r})" if field in values and not _is_secret(cls, field) else ""
            problems.append(f"{name}: {error['msg']}{shown}")
        return None, problems


def settings_table(cls: type[ServiceSettings]) -> str:
    """Return the allowed environment names of a service with type, default and meaning, for people."""
    lines = []
    for name, field in cls.model_fields.items():
        default = (
            "required" if field.is_required() else f"default {_shown(field.get_default(call_default_factory=True))}"
        )
        lines.append(f"  {prefix(cls.service)}{name.upper()}  [{_type_name(field.annotation)}, {default}]")
        lines.extend(f"      {line}" for line in (field.description or "").splitlines())
    return "\n".join(lines)


def child_environment(
    service: str,
    settings: Mapping[str, object],
    base: Mapping[str, str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment that starts `service` with `settings`.

    settings: field name -> value; None leaves the default.  base: what to inherit, this process's by default; its
    FATHOM_* names are dropped.  extra: variables of other libraries (OMP_NUM_THREADS, ...), set as they are.
    """
    inherited = os.environ if base is None else base  # noqa: TID251 - the one place that reads it
    child = {name: value for name, value in inherited.items() if not name.upper().startswith("FATHOM_")}
    child.update(extra or {})
    for field, value in settings.items():
        if value is not None:
            child[f"{prefix(service)}{field.upper()}"] = _encode(value)
    return child


def house_names() -> list[str]:
    """Return the FATHOM_* names in this process's environment: for a program that is told its settings otherwise."""
    return sorted(name for name in os.environ if name.upper().startswith("FATHOM_"))  # noqa: TID251 - the one place that reads it


def complain(cls: type[ServiceSettings], problems: Sequence[str]) -> None:
    """Write the problems to stderr, and what is allowed."""
    text = "\n".join(f"  {problem}" for problem in problems)
    sys.stderr.write(f"{cls.service}: bad settings\n{text}\nallowed:\n{settings_table(cls)}\n")


def _refuse(cls: type[ServiceSettings], problems: list[str]) -> NoReturn:
    complain(cls, problems)
    raise SystemExit(EXIT_CONFIG)


def _encode(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return str(value)


def _decode(cls: type[ServiceSettings], field: str, value: str) -> object:
    """Return JSON for fields that hold several values, the text itself for all others."""
    if get_origin(cls.model_fields[field].annotation) not in {tuple, list, dict, set, frozenset}:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # pydantic then names the type it wanted


def _is_secret(cls: type[ServiceSettings], field: str) -> bool:
    annotation = cls.model_fields[field].annotation
    return annotation is SecretStr or SecretStr in get_args(annotation)


def _shown(default: object) -> str:
    return json.dumps(default) if isinstance(default, str) else str(default)


def _type_name(annotation: Any) -> str:  # a type expression has no narrower type
    if get_origin(annotation) is Literal:
        return "|".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) is None and annotation is not None:
        return "path" if annotation is Path else str(getattr(annotation, "__name__", annotation))
    return str(annotation).replace("typing.", "")
