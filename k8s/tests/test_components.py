"""Do the parts that overlays may add fit the rest?"""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from k8s.tests.conftest import ROOT, Object, containers, of_kind
from k8s.tests.test_settings import environment, service_of
from services.chassis import config
from services.chassis.kvstore_shards import parse_replicas
from services.kvstore.blobs import load_options, open_blobs
from services.kvstore.config import KvstoreSettings

OPTIONS = {"endpoint": "http://s3.storage:80", "access_key_id": "a", "secret_access_key": "b"}


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> tuple[Object, ...]:
    """The local overlay with object storage added, as an operator would write it."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: nothing to render the manifests with")
    folder = tmp_path_factory.mktemp("overlay").resolve()
    (folder / "options.json").write_text(json.dumps(OPTIONS))
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "fathom",
        "resources": [os.path.relpath(ROOT / "overlays/local", folder)],
        "components": [os.path.relpath(ROOT / "components/kvstore_objects", folder)],
        "secretGenerator": [{"name": "fathom-object-store", "files": ["options.json"]}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60)
    assert 0 == done.returncode, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item)


def given_to(objects: tuple[Object, ...], service: str) -> dict[str, str]:
    [container] = [container for _, container in containers(objects) if service_of(container) == service]
    return environment(objects, container)


def test_objects_match_the_schema(objects):
    """No unknown field, no wrong type."""
    for item in objects:
        kubernetes_validate.validate(item, "1.32", strict=True)


def test_everybody_is_told_of_the_same_stores(objects):
    """As many as run, by the names and addresses that their set gives them."""
    [stores] = [item for item in of_kind(objects, "StatefulSet") if item["metadata"]["name"] == "kvstore"]
    told = {
        given_to(objects, service)[f"FATHOM_{service.upper()}_KVSTORE_ADDRESS"]
        for service in ("entrypoint", "prefill", "decode")
    }
    expected = [
        (f"kvstore-{n}", f"kvstore-{n}.{stores['spec']['serviceName']}:50051")
        for n in range(stores["spec"]["replicas"])
    ]

    assert 1 == len(told)
    assert expected == [(one.name, one.address) for one in parse_replicas(told.pop())]


def test_the_stores_accept_what_they_are_told(objects, tmp_path: Path):
    """URL and options file are ones they would start with, and the file is where the settings say."""
    given = given_to(objects, "kvstore")
    settings, problems = config.check(KvstoreSettings, given)
    [container] = [container for _, container in containers(objects) if service_of(container) == "kvstore"]
    file = Path(given["FATHOM_KVSTORE_OBJECT_STORE_OPTIONS_FILE"])
    [secret] = [
        item for item in of_kind(objects, "Secret") if item["metadata"]["name"].startswith("fathom-object-store")
    ]
    (tmp_path / file.name).write_bytes(base64.b64decode(secret["data"][file.name]))

    assert [] == problems
    assert settings is not None
    assert [True] == [
        mount["readOnly"] for mount in container["volumeMounts"] if mount["mountPath"] == str(file.parent)
    ]
    open_blobs(settings.object_store_url, load_options(tmp_path / file.name))
