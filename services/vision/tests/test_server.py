"""Does the vision service encode each image once, keep it, send it whole, and refuse the others clearly?"""

import asyncio
import hashlib
import json
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image
from prometheus_client import CollectorRegistry

from kernels.models.vision import ImageEncoder, load_encoder
from kernels.tests.golden_files import tiny_v41
from proto.common_pb2 import ImageRef
from proto.vision_pb2 import EncodeRequest
from proto.vision_pb2_grpc import VisionStub, add_VisionServicer_to_server
from services.chassis.channel import open_channel
from services.chassis.engine_thread import EngineThread
from services.chassis.errors import BadImage, BlocksLost, Overloaded
from services.chassis.images import ImageRules, check_encoded, layout_of
from services.chassis.testing import running, serve, until
from services.vision.config import VisionSettings
from services.vision.encoding import ImageDesk
from services.vision.metrics import VisionMetrics
from services.vision.model import Sight
from services.vision.pictures import pixels_of
from services.vision.server import Servicer, build

RULES = ImageRules(patch_size=14, downsample=3, max_image_tokens=64, min_pixels=7056)
HIDDEN = 128


def png(seed: int = 0, size: tuple[int, int] = (95, 66)) -> bytes:
    out = BytesIO()
    Image.new("RGB", size, (seed, 100, 200)).save(out, "PNG")
    return out.getvalue()


def image(data: bytes) -> ImageRef:
    return ImageRef(content_hash=hashlib.sha256(data).digest(), data=data, media_type="image/png")


def by_hash(data: bytes) -> ImageRef:
    return ImageRef(content_hash=hashlib.sha256(data).digest())


def ask(*images: ImageRef, fingerprint: bytes = b"") -> EncodeRequest:
    return EncodeRequest(request_id="r", model="tiny", images=images, fingerprint=fingerprint)


@pytest.fixture(scope="module")
def tower() -> ImageEncoder:
    loaded = load_encoder(tiny_v41(), dtype="fp32", threads=1)
    assert loaded is not None
    return loaded


class Replica:
    """A vision replica without its process, and a stub that dials it."""

    def __init__(self, desk: ImageDesk, thread: EngineThread, registry: CollectorRegistry, stub: Any) -> None:
        self.desk, self.registry, self.stub = desk, registry, stub
        self._thread = thread

    @contextmanager
    def engine_held(self) -> Iterator[None]:
        """Let nothing be encoded inside: images stay in line."""
        gate = threading.Event()
        self._thread.post(gate.wait, 5)
        try:
            yield
        finally:
            gate.set()

    def num_waiting(self) -> float:
        return self.registry.get_sample_value("fathom_vision_waiting") or 0.0

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("fathom_vision_images_total", {"outcome": outcome}) or 0.0

    async def embeddings(self, request: EncodeRequest) -> list[bytes]:
        """The stream's images, put together and checked as prefill does."""
        found = [bytearray() for _ in request.images]
        async for chunk in self.stub.Encode(request, timeout=30):
            assert len(chunk.data) <= 2 << 20
            assert zlib.crc32(chunk.data) == chunk.crc32
            assert len(found[chunk.image_index]) == chunk.offset_bytes
            found[chunk.image_index] += chunk.data
        return [bytes(each) for each in found]


async def replica_of(tower: ImageEncoder, **limits: int) -> AsyncIterator[Replica]:
    thread = EngineThread("test vision")
    thread.start()
    registry = CollectorRegistry()
    metrics = VisionMetrics(registry)
    desk = ImageDesk(Sight(tower, RULES), thread, metrics, **limits)
    servicer = Servicer(desk, metrics, "vision-7:50051")
    add = lambda server: add_VisionServicer_to_server(servicer, server)  # noqa: E731 - too short to be named
    async with serve(add) as address, open_channel(address) as channel:
        yield Replica(desk, thread, registry, VisionStub(channel))
    await thread.stop()


@pytest.fixture
async def replica(tower: ImageEncoder) -> AsyncIterator[Replica]:
    async for made in replica_of(tower):
        yield made


@pytest.fixture
async def small_replica(tower: ImageEncoder) -> AsyncIterator[Replica]:
    """Room for two images' embeddings, and one in line."""
    tokens = layout_of(95, 66, RULES).num_tokens
    async for made in replica_of(tower, cache_bytes=2 * tokens * HIDDEN * 4, max_waiting=1):
        yield made


async def test_prepare_says_what_prefill_needs(replica: Replica, tower: ImageEncoder) -> None:
    """Hash and tokens of each image in order, where the embeddings lie, and which tower made them."""
    one, two = png(1), png(2, size=(300, 100))
    reply = await replica.stub.Prepare(ask(image(one), image(two)), timeout=30)

    expected = [(hashlib.sha256(data).digest(), layout_of(*size, RULES).num_tokens)
                for data, size in ((one, (95, 66)), (two, (300, 100)))]  # fmt: skip
    assert expected == [(each.content_hash, each.num_tokens) for each in reply.images]
    assert ("vision-7:50051", tower.fingerprint) == (reply.address, reply.fingerprint)


async def test_what_was_prepared_comes_by_hash_alone(replica: Replica, tower: ImageEncoder) -> None:
    """The tower's bits, complete, with a checksum for each piece."""
    one, two = png(1), png(2, size=(300, 100))
    await replica.stub.Prepare(ask(image(one), image(two)), timeout=30)
    got = await replica.embeddings(ask(by_hash(two), by_hash(one), fingerprint=tower.fingerprint))

    layout = layout_of(95, 66, RULES)
    pixels = pixels_of(one, check_encoded(one), layout)
    assert tower.encode(pixels, width=layout.width, height=layout.height) == got[1]
    assert layout_of(300, 100, RULES).num_tokens * HIDDEN * 4 == len(got[0])


async def test_equal_images_are_encoded_once(replica: Replica) -> None:
    """At the same time they share the work, later they find it done."""
    await asyncio.gather(*(replica.stub.Prepare(ask(image(png(3))), timeout=30) for _ in range(5)))
    await replica.stub.Prepare(ask(image(png(3))), timeout=30)
    assert (1, 5) == (replica.count("encoded"), replica.count("shared") + replica.count("cached"))


async def test_a_caller_that_leaves_takes_nothing_from_the_others(replica: Replica) -> None:
    """The image is encoded all the same, and the second caller gets it."""
    with replica.engine_held():
        leaving = asyncio.ensure_future(replica.desk.embeddings_of(image(png(4))))
        await until(lambda: replica.num_waiting() == 1)
        staying = asyncio.ensure_future(replica.desk.embeddings_of(image(png(4))))
        leaving.cancel()
    assert hashlib.sha256(png(4)).digest() == (await staying).content_hash


async def test_embeddings_that_are_gone_are_said_to_be(small_replica: Replica) -> None:
    """The oldest goes when there is no room: its reader hears BlocksLost and can have it encoded again."""
    for seed in (1, 2, 3):
        await small_replica.stub.Prepare(ask(image(png(seed))), timeout=30)
    assert 1 == len(await small_replica.embeddings(ask(by_hash(png(3)))))
    with pytest.raises(BlocksLost, match="not here"):
        await small_replica.embeddings(ask(by_hash(png(1))))


async def test_another_towers_embeddings_are_not_ours(replica: Replica) -> None:
    """Bits of another fingerprint under the same block keys would be wrong KV."""
    await replica.stub.Prepare(ask(image(png(1))), timeout=30)
    with pytest.raises(BlocksLost, match="another vision model"):
        await replica.embeddings(ask(by_hash(png(1)), fingerprint=bytes(32)))


async def test_a_full_line_sheds(small_replica: Replica) -> None:
    """One image is in line; another one is told when to come back, an equal one is let in."""
    with small_replica.engine_held():
        first = asyncio.ensure_future(small_replica.desk.embeddings_of(image(png(1))))
        await until(lambda: small_replica.num_waiting() == 1)
        with pytest.raises(Overloaded, match="in line") as caught:
            await small_replica.desk.embeddings_of(image(png(2)))
        equal = asyncio.ensure_future(small_replica.desk.embeddings_of(image(png(1))))
    assert await first is await equal
    assert caught.value.retry_after > 0


async def test_more_than_can_be_kept_together_is_refused(small_replica: Replica) -> None:
    """The first would be gone before the last is encoded: no retry could mend that."""
    with pytest.raises(BadImage, match="send fewer"):
        await small_replica.stub.Prepare(ask(image(png(1)), image(png(2))), timeout=30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GIF89a" + bytes(40), "neither PNG nor JPEG nor WebP"),
        (png()[:40], "damaged"),
        (png()[:16] + (20_000).to_bytes(4, "big") * 2 + png()[24:], "20000 x 20000"),
    ],
)
async def test_a_bad_image_is_the_callers_fault(replica: Replica, data: bytes, words: str) -> None:
    """400 with the reason, and nothing is left in line."""
    with pytest.raises(BadImage, match=words) as caught:
        await replica.stub.Prepare(ask(image(data)), timeout=30)
    assert "messages" == caught.value.field
    assert 0 == replica.num_waiting()


async def test_a_false_hash_is_refused(replica: Replica) -> None:
    """Otherwise one image's embeddings could be had, and cached as KV, under another one's name."""
    wrong = image(png(1))
    wrong.content_hash = bytes(32)
    with pytest.raises(BadImage, match="content_hash"):
        await replica.stub.Prepare(ask(wrong), timeout=30)


async def test_a_model_without_a_tower_refuses_by_name(tmp_path: Path) -> None:
    """The caller learns which model, which field, and what to do instead; text that comes by is no error."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    settings = VisionSettings(drain_seconds=1, model=tmp_path)
    async with running(settings, build) as service, open_channel(service.address) as channel:
        stub: Any = VisionStub(channel)
        request = EncodeRequest(request_id="r", model="smol", images=[ImageRef(data=b"png", media_type="image/png")])
        with pytest.raises(BadImage, match="'smol' takes no images: send text only") as caught:
            await stub.Prepare(request, timeout=30)
        with pytest.raises(BadImage):
            [chunk async for chunk in stub.Encode(request, timeout=30)]
        assert [] == [chunk async for chunk in stub.Encode(EncodeRequest(request_id="r"), timeout=30)]
    assert ("messages", grpc.StatusCode.INVALID_ARGUMENT) == (caught.value.field, caught.value.code)


async def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    """A model that is still being pulled must not be taken for one that sees nothing."""
    with pytest.raises(FileNotFoundError, match="holds no model"):
        async with running(VisionSettings(drain_seconds=0, model=tmp_path), build):
            pass


async def test_the_whole_service_encodes() -> None:
    """Loaded from the folder, ready, and its address is where it can be dialled."""
    settings = VisionSettings(drain_seconds=1, model=tiny_v41(), dtype="bf16", threads=1)
    async with running(settings, build) as service, open_channel(service.address) as channel:
        stub: Any = VisionStub(channel)
        reply = await stub.Prepare(ask(image(png(1))), timeout=30)
        health: Any = health_pb2_grpc.HealthStub(channel)  # the generated class has no types
        ready = await health.Check(health_pb2.HealthCheckRequest(service="ready"), timeout=30)
        assert (service.address, 32) == (reply.address, len(reply.fingerprint))
        assert ready.status == health_pb2.HealthCheckResponse.SERVING
