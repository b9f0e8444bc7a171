"""What can an entrypoint be told?"""

import pytest

from services.chassis.config import check
from services.chassis.service import Service
from services.chassis.testing import free_port, running
from services.entrypoint.config import EntrypointSettings
from services.entrypoint.server import build

GIVEN = {
    "FATHOM_ENTRYPOINT_PREFILL_LB_ADDRESS": "127.0.0.1:1",
    "FATHOM_ENTRYPOINT_DECODE_LB_ADDRESS": "127.0.0.1:2",
    "FATHOM_ENTRYPOINT_CLUSTER_KEY": "ab" * 32,
}


def test_the_least_that_starts_it():
    settings, problems = check(EntrypointSettings, GIVEN)

    assert settings is not None
    assert (b"\xab" * 32, []) == (settings.cluster_key_bytes, problems)


@pytest.mark.parametrize("key", ["ab" * 31, "not hex", ""])
def test_a_bad_cluster_key_is_named_and_not_shown(key):
    settings, problems = check(EntrypointSettings, {**GIVEN, "FATHOM_ENTRYPOINT_CLUSTER_KEY": key})

    assert settings is None
    assert ["FATHOM_ENTRYPOINT_CLUSTER_KEY"] == [problem.split(":")[0] for problem in problems]
    assert not key or key not in problems[0]


async def test_a_whole_entrypoint_starts_and_drains_without_any_peer():
    settings, _ = check(EntrypointSettings, {**GIVEN, "FATHOM_ENTRYPOINT_NATS_URL": f"nats://127.0.0.1:{free_port()}"})
    assert settings is not None
    async with running(settings, build) as service:
        assert isinstance(service, Service)
        assert service.health()["ready"]


@pytest.mark.parametrize("address", ["store", "a=store:1,a=store:2", "store:1 store:2"])
def test_a_bad_list_of_stores_is_refused(address):
    """Two processes that read it differently would place blocks differently."""
    settings, problems = check(EntrypointSettings, {**GIVEN, "FATHOM_ENTRYPOINT_KVSTORE_ADDRESS": address})

    assert settings is None
    assert ["FATHOM_ENTRYPOINT_KVSTORE_ADDRESS"] == [problem.split(":")[0] for problem in problems]
