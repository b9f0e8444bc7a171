"""Does the vision service answer health, and refuse images clearly?"""

from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.common_pb2 import ImageRef
from proto.vision_pb2 import EncodeRequest
from proto.vision_pb2_grpc import VisionStub
from services.chassis.channel import open_channel
from services.chassis.errors import BadImage
from services.chassis.testing import running
from services.vision.config import VisionSettings
from services.vision.server import build


@pytest.fixture
async def channel():
    async with running(VisionSettings(drain_seconds=1), build) as service, open_channel(service.address) as channel:
        yield channel


async def test_an_image_is_refused_by_name(channel: grpc.aio.Channel) -> None:
    """The caller learns which model, which field, and what to do instead."""
    request = EncodeRequest(request_id="r", model="smol", images=[ImageRef(data=b"png", media_type="image/png")])
    with pytest.raises(BadImage, match="'smol' takes no images: send text only") as caught:
        [chunk async for chunk in VisionStub(channel).Encode(request, timeout=5)]

    assert ("messages", grpc.StatusCode.INVALID_ARGUMENT) == (caught.value.field, caught.value.code)


async def test_no_images_is_an_empty_stream(channel: grpc.aio.Channel) -> None:
    """A text request that comes by is no error."""
    assert [] == [chunk async for chunk in VisionStub(channel).Encode(EncodeRequest(request_id="r"), timeout=5)]


async def test_it_says_it_is_ready(channel: grpc.aio.Channel) -> None:
    """Probes can tell a running vision service from an absent one."""
    health: Any = health_pb2_grpc.HealthStub(channel)  # the generated class has no types
    reply = await health.Check(health_pb2.HealthCheckRequest(service="ready"), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
