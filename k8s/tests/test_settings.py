"""Would the services accept what the manifests tell them?"""

import base64
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k8s.tests.conftest import OVERLAYS, ROOT, Object, containers, of_kind, pod_templates, render
from services.chassis import config
from services.chassis.config import SERVICES, ServiceSettings
from services.local.children import nats_server

# What the kubelet would fill in.
FIELDS = {"status.podIP": "10.1.2.3", "metadata.name": "pod-0"}


def settings_class(service: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"services.{service}.config")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceSettings) and value is not ServiceSettings
    ]
    assert 1 == len(found), service
    return found[0]


def environment(objects: tuple[Object, ...], container: Object) -> dict[str, str]:
    """Return the variables a kubelet would set, $(NAME) expanded."""
    maps = {item["metadata"]["name"]: item.get("data") or {} for item in of_kind(objects, "ConfigMap")}
    secrets = {
        item["metadata"]["name"]: {key: base64.b64decode(value).decode() for key, value in item["data"].items()}
        for item in of_kind(objects, "Secret")
    }
    values: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            text = FIELDS[source["fieldRef"]["fieldPath"]]
        elif "configMapKeyRef" in source:
            text = maps[source["configMapKeyRef"]["name"]][source["configMapKeyRef"]["key"]]
        elif "secretKeyRef" in source:
            text = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        else:
            text = variable.get("value", "")
        values[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text)
    return values


def service_of(container: Object) -> str | None:
    """Return which service a container runs, by its command."""
    module = container.get("command", [""])[-1]
    return module.removeprefix("services.") if module.startswith("services.") else None


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_accepts_its_environment(overlay, service: str) -> None:
    """No unknown name, no bad value, nothing required left out; and no variable of another service."""
    if not (ROOT.parent / "services" / service / "config.py").exists():
        pytest.skip(f"services/{service}/config.py is not written yet")
    [container] = [container for _, container in containers(overlay) if service_of(container) == service]
    given = environment(overlay, container)

    settings, problems = config.check(settings_class(service), given)

    assert [] == problems
    assert settings is not None
    known = {config.prefix(service) + field.upper() for field in settings_class(service).model_fields}
    assert not [name for name in given if name.startswith("FATHOM_") and name not in known]


@pytest.mark.parametrize("service", SERVICES)
def test_listeners_are_where_the_probes_ask(overlay, service: str) -> None:
    """The ports in the settings are the container's ports, open to the pod's address."""
    [container] = [container for _, container in containers(overlay) if service_of(container) == service]
    given = environment(overlay, container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    start = config.prefix(service)

    assert f"0.0.0.0:{ports['grpc']}" == given[start + "LISTEN"]
    assert f"0.0.0.0:{ports['metrics']}" == given[start + "METRICS_LISTEN"]
    assert f"10.1.2.3:{ports['grpc']}" == given[start + "ADVERTISE"]
    if service == "recipe":
        assert f"0.0.0.0:{ports['http']}" == given[start + "PUBLIC_LISTEN"]


def test_addresses_name_services_that_exist(overlay) -> None:
    """Every *_ADDRESS and the NATS URL is a Service of this overlay, with one of its ports."""
    ports = {
        (item["metadata"]["name"], port["port"])
        for item in of_kind(overlay, "Service")
        for port in item["spec"]["ports"]
    }
    for name, container in containers(overlay):
        for variable, value in environment(overlay, container).items():
            if variable.endswith(("_ADDRESS", "_NATS_URL")):
                host, _, port = value.removeprefix("nats://").rpartition(":")
                assert (host, int(port)) in ports, (name, variable)


def test_no_service_link_could_look_like_a_setting(overlay) -> None:
    """Should a pod get service links after all, <SERVICE>_PORT must not begin with our prefix."""
    for item in of_kind(overlay, "Service"):
        assert not item["metadata"]["name"].upper().replace("-", "_").startswith("FATHOM")


def test_the_model_is_where_the_settings_say(overlay) -> None:
    """Whoever is told of a model has the model's volume mounted at that place, and cannot write it."""
    for name, template in pod_templates(overlay):
        for container in template["spec"]["containers"]:
            given = environment(overlay, container)
            folders = [value for variable, value in given.items() if variable.endswith("_MODEL")]
            mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
            for folder in folders:
                assert mounts[str(Path(folder).parent)]["readOnly"] is True, name


@pytest.mark.parametrize("conf", sorted(ROOT.glob("**/nats.conf")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nats_accepts_its_configuration(conf: Path) -> None:
    """The real server reads the file and finds it valid."""
    done = subprocess.run(
        [nats_server(), "-t", "-c", str(conf)],
        env={"POD_NAME": "nats-0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert 0 == done.returncode, done.stderr


@pytest.mark.parametrize("overlay_name", OVERLAYS)
def test_one_nats_server_has_no_cluster_and_several_have(overlay_name: str) -> None:
    """A single server that waits for a quorum of three never serves; three without routes never meet."""
    objects = render(overlay_name)
    [nats] = [item for item in of_kind(objects, "StatefulSet") if item["metadata"]["name"] == "nats"]
    [conf] = [
        item["data"]["nats.conf"]
        for item in of_kind(objects, "ConfigMap")
        if item["metadata"]["name"].startswith("nats-config")
    ]

    assert (nats["spec"]["replicas"] > 1) == ("cluster {" in conf)


@pytest.mark.slow
def test_importing_a_services_main_has_no_effect(tmp_path: Path) -> None:
    """A tool that imports every module starts nothing, prints nothing and writes nothing.

    Nor does it wait for torch: an engine imports it once its settings are right and its weights are there.
    """
    code = (
        "import importlib, sys, threading\n"
        f"for name in {(*SERVICES, 'local')!r}:\n"
        "    importlib.import_module(f'services.{name}.__main__')\n"
        "    assert 1 == threading.active_count(), (name, threading.enumerate())\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
    assert [] == list(tmp_path.iterdir())
