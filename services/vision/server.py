"""How do images become embeddings? Not yet: no vision model is loaded, so every image is refused by name."""

from collections.abc import AsyncIterator

from proto.vision_pb2 import EncodeChunk, EncodeRequest
from proto.vision_pb2_grpc import VisionServicer, add_VisionServicer_to_server
from services.chassis.errors import BadImage
from services.chassis.service import Service


class Servicer(VisionServicer):
    """Answers Encode for models that take no images."""

    async def Encode(self, request: EncodeRequest, _context: object) -> AsyncIterator[EncodeChunk]:
        if request.images:
            raise BadImage(f"model {request.model!r} takes no images: send text only", field="messages")
        return
        yield EncodeChunk()  # never reached; makes this a stream, an empty one without images


async def build(service: Service) -> None:
    """Serve Encode."""
    add_VisionServicer_to_server(Servicer(), service.server)
