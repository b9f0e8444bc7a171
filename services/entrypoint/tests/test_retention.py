"""Does the class that a key gives its KV reach everybody who stores some?"""

import pytest

from proto.common_pb2 import RetentionClass
from services.entrypoint.tests.world import World

AGENT = RetentionClass.RETENTION_CLASS_AGENT


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_the_retention_class_reaches_prefill_and_decode(tenant):
    """They write the blocks back, under the request's tenant and class."""
    async with World() as world:
        await world.ask(retention=AGENT, tenant=tenant)

    for submitted in (world.prefills["prefill-0"].submitted[0], world.decodes["decode-0"].submitted[0]):
        assert (AGENT, tenant) == (submitted.request.retention, submitted.request.tenant)
