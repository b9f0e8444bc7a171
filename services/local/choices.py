"""Would every service take what the caller of `fathom up` chose?"""

import importlib
from collections.abc import Sequence
from difflib import get_close_matches

from services.chassis import config
from services.chassis.config import SERVICES, ServiceSettings
from services.local.plan import WIRED, Options

NO_MATCH = "String should match pattern"
"""How pydantic begins to quote a regular expression."""
WANTED = {
    "otlp_endpoint": "no address of a collector: write http:// or https://, a host and a port, for example "
    "http://127.0.0.1:4317",
    "object_store_url": "no object store: write file:///FOLDER or s3://BUCKET/PREFIX, for example file:///srv/kv",
}


def check_choices(options: Options) -> None:
    """Raise ValueError, a line for each problem, when a service would refuse a choice; in the words that were typed."""
    problems = [problem for problem in (_misnamed(*chosen) for chosen in options.settings) if problem]
    problems = problems or [line for service in SERVICES for line in _refused(service, options)]
    if problems:
        raise ValueError("\n".join(problems))


def check_environment(environment_names: Sequence[str]) -> None:
    """Raise ValueError, a line for each FATHOM_* name: the services started here read none, and none is ignored."""
    if environment_names:
        raise ValueError("\n".join(_unread(name) for name in environment_names))


def _unread(name: str) -> str:
    owners = [service for service in SERVICES if name.upper().startswith(config.prefix(service))]
    if not owners:
        known = ", ".join(config.prefix(service) for service in SERVICES)
        return f"{name} in the environment: no such setting; names begin with {known}"
    service = max(owners, key=len)  # FATHOM_PREFILL_LB_ begins with FATHOM_PREFILL_
    field = name.upper().removeprefix(config.prefix(service)).lower()
    fields = [each for each in settings_of(service).model_fields if each not in WIRED]
    if field in WIRED:
        return f"{name} in the environment: fathom up sets this one itself"
    if field in fields:
        return f"{name} in the environment is not read by fathom up: write --set {service}.{field}=VALUE"
    near = get_close_matches(field, fields, n=1)
    meant = f"; did you mean --set {service}.{near[0]}=VALUE?" if near else ";"
    return f"{name} in the environment: no such setting{meant} {service} has {', '.join(fields)}"


def settings_of(service: str) -> type[ServiceSettings]:
    """Return the settings class of a service."""
    names = vars(importlib.import_module(f"services.{service}.config")).values()
    return next(
        name
        for name in names
        if isinstance(name, type) and issubclass(name, ServiceSettings) and name is not ServiceSettings
    )


def _misnamed(service: str, field: str, value: str) -> str:
    typed = f"--set {service}.{field}={value}"
    if service not in SERVICES:
        return f"{typed}: no such service; there are {', '.join(SERVICES)}"
    if field in WIRED:
        return f"{typed}: fathom up sets this one itself"
    fields = settings_of(service).model_fields
    if field not in fields:
        return f"{typed}: no such setting; {service} has {', '.join(name for name in fields if name not in WIRED)}"
    return ""


def _refused(service: str, options: Options) -> list[str]:
    """Return what the service would say of the chosen values, behind the option that each came from."""
    typed = {
        field: (f"--set {service}.{field}={value}", value)
        for owner, field, value in options.settings
        if owner == service
    }
    if service == "kvstore":
        typed.setdefault(
            "max_bytes", (f"--kv-bytes ({options.kv_bytes} bytes)", str(options.kv_bytes // options.num_kvstore))
        )
        if options.kv_url:
            typed["object_store_url"] = f"--kv-url {options.kv_url}", options.kv_url
    if service == SERVICES[0]:  # all services take it; one complaint is enough
        typed.setdefault("otlp_endpoint", (f"--otlp-endpoint {options.otlp_endpoint}", options.otlp_endpoint))
    values = {field: value for field, (_, value) in typed.items()}
    _, found = config.check(settings_of(service), config.child_environment(service, values, base={}))
    # What the launcher will set itself is missing still, and complained about; only the choices matter here.
    names = {f"{config.prefix(service)}{field.upper()}": option for field, (option, _) in typed.items()}
    lines = []
    for problem in found:
        name, _, reason = problem.partition(": ")
        if names.get(name, "").startswith("--kv-bytes "):
            # The only bound of `max_bytes`, in the unit that was typed, for all replicas together.
            lines.append(f"{names[name]}: at least {options.num_kvstore}M")
        elif name in names:
            lines.append(f"{names[name]}: {_in_words(service, name, reason.rpartition(' (got ')[0] or reason)}")
    return lines


def _in_words(service: str, name: str, reason: str) -> str:
    """Return what a refusal means for a person, to whom a regular expression says nothing. name: of the environment."""
    if not reason.startswith(NO_MATCH):
        return reason
    field = name.removeprefix(config.prefix(service)).lower()
    about = settings_of(service).model_fields[field].description or ""
    return WANTED.get(field) or f"this has another form: {' '.join(about.split())}"
