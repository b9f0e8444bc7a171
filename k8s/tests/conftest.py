"""What do the manifests look like once rendered?"""

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
# What can be applied as it is, and the base that overlays build on.
OVERLAYS = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("overlays/*/kustomization.yaml"))
Object = dict[str, Any]


@functools.cache
def render(folder: str) -> tuple[Object, ...]:
    """Return the objects `kubectl kustomize` makes of a folder; skip the test where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: nothing to render the manifests with")
    done = subprocess.run(
        [kubectl, "kustomize", str(ROOT / folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert 0 == done.returncode, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item)


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def pod_templates(objects: tuple[Object, ...]) -> list[tuple[str, Object]]:
    """Return (workload name, pod template) of everything that makes pods."""
    return [
        (item["metadata"]["name"], item["spec"]["template"])
        for item in of_kind(objects, "Deployment", "StatefulSet", "Job")
    ]


def containers(objects: tuple[Object, ...]) -> list[tuple[str, Object]]:
    """Return (workload name, container) of every container, init containers included."""
    return [
        (name, container)
        for name, template in pod_templates(objects)
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"])
    ]


@pytest.fixture(params=OVERLAYS)
def overlay(request) -> tuple[Object, ...]:
    """Every overlay, rendered."""
    return render(request.param)
