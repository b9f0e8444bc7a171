"""How do a request's images become embeddings that prefill can fetch?"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proto.common_pb2 import ImageRef, Request
from proto.vision_pb2 import EncodeRequest, PrepareReply
from services.chassis import names
from services.chassis.errors import BadImage, DeadlinePassed, InternalError, NoReplica, PeerLost
from services.chassis.telemetry import SpanKind, span

if TYPE_CHECKING:
    from services.entrypoint.peers import Peers

PREPARE_SECONDS = 120.0
"""A tower on a CPU takes a minute for a large image. The request's own deadline ends the wait earlier."""

RETRY_PAUSE_SECONDS = 0.2
"""Before a lost image encoder is tried again: a restarted one, or the next one behind its name, listens by then."""


async def encode_images(request: Request, peers: Peers) -> Request:
    """Return the request with, in each image, where its embeddings lie and which vision model made them.

    A request without images comes back as it is.  One that was encoded before is encoded again, which costs nothing
    where the embeddings still are.  Raises BadImage, Overloaded, NoReplica, and PeerLost when the image encoder cannot
    be reached twice, or when a second encoding comes from another model than the first: its KV has other names.
    """
    if not request.images:
        return request
    with span("vision.prepare", kind=SpanKind.CLIENT) as hop:
        hop.set_attribute(names.IMAGES, len(request.images))
        reply = await _prepare(request, peers)
        hop.set_attribute(names.REPLICA, reply.address)
    if not reply.address or len(reply.images) != len(request.images):
        raise InternalError(f"the image encoder answered {len(reply.images)} of {len(request.images)} images")
    seeing = Request()
    seeing.CopyFrom(request)
    for image, encoded in zip(seeing.images, reply.images, strict=True):
        if encoded.content_hash != image.content_hash or encoded.num_tokens != image.num_tokens:
            raise BadImage(
                f"an image has {image.num_tokens} places in the prompt; the model fills {encoded.num_tokens} with it",
                field="messages",
            )
        if image.vision_fingerprint not in {b"", reply.fingerprint}:
            raise PeerLost("the image encoder was replaced while the request ran")
        image.vision_address, image.vision_fingerprint = reply.address, reply.fingerprint
    return seeing


async def _prepare(request: Request, peers: Peers) -> PrepareReply:
    if peers.vision is None:
        raise NoReplica("no image encoder is set up here")
    images = [
        ImageRef(content_hash=image.content_hash, data=image.data, media_type=image.media_type)
        for image in request.images
    ]
    ask = EncodeRequest(request_id=request.request_id, model=request.model, images=images)
    try:
        try:
            return await peers.vision.Prepare(ask, timeout=PREPARE_SECONDS)
        except PeerLost as lost:
            peers.note_retry("vision", "vision", lost)
            await asyncio.sleep(RETRY_PAUSE_SECONDS)
            return await peers.vision.Prepare(ask, timeout=PREPARE_SECONDS)
    except DeadlinePassed as late:
        raise PeerLost("the image encoder did not answer in time") from late
