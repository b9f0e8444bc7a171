"""Do images stand in a prompt as if their embeddings had always been there?"""

import asyncio

import pytest

from kernels.batch import Image
from kernels.tests.shallow_v41 import shallow_v41
from services.chassis.tests.memory_vision import memory_vision
from services.chassis.window_store import folders
from services.prefill.prompt import ChunkDone
from services.prefill.tests.rig import kinds, prefill_replica, request, until
from services.prefill.tests.test_windows import EXACT, first_of, same_as_alone

pytestmark = pytest.mark.slow

FIRST, OTHERS = 322, 321


@pytest.fixture(scope="session")
def v41():
    return shallow_v41()


@pytest.fixture
async def vision():
    async with memory_vision(hidden_size=128, chunk_bytes=900) as served:
        yield served


@pytest.fixture
async def rig(v41, tmp_path):
    async with prefill_replica(v41, states=tmp_path) as running:
        yield running
        await running.idle()


def with_images(name, num_tokens, *images):
    wanted = request(name, num_tokens)
    for image in images:
        end = image.position + image.num_tokens
        wanted.prompt_token_ids[image.position : end] = [FIRST] + [OTHERS] * (image.num_tokens - 1)
        wanted.images.append(image)
    return wanted


class Alone:
    """As the rig's source, with the embeddings spliced in."""

    def __init__(self, rig, vision):
        self.rig, self.vision = rig, vision
        self.window = rig.source.window

    @property
    def source(self):
        return self

    @property
    def decode(self):
        return self.rig.decode

    def prompt(self, wanted):
        embeddings = self.vision.embeddings
        return self.rig.source.prompt(
            wanted, tuple(Image(i.position, i.num_tokens, embeddings[i.content_hash]) for i in wanted.images)
        )


def chunks_of(rig):
    """Record each chunk's length."""
    lengths = []
    tell = rig.replica.engine._tell

    def listening(listener, happening):
        if isinstance(happening, ChunkDone):
            lengths.append(happening.num_tokens)
        tell(listener, happening)

    rig.replica.engine._tell = listening
    return lengths


async def test_images_give_the_bits_of_the_whole_prompt(rig, vision):
    """First, last, side by side, longer than a chunk: no chunk ends inside one, and each is fetched once."""
    images = [vision.image(f"i{at}", position=at, num_tokens=n) for at, n in ((0, 5), (20, 40), (60, 9), (95, 5))]
    wanted = with_images("pictures", 100, *images)
    lengths = chunks_of(rig)
    first = await first_of(rig, wanted)
    ends = {sum(lengths[:n]) for n in range(1, len(lengths) + 1)}

    assert same_as_alone(Alone(rig, vision), wanted, first)
    assert [image.content_hash for image in images] == vision.fetched
    assert not [end for end in ends for i in images if i.position < end < i.position + i.num_tokens]
    assert 0 == rig.replica.servicer._around.embeddings.room.held_bytes


async def test_a_hit_ends_inside_an_image(rig, vision, tmp_path):
    """What follows the hit is computed with the same image; an image inside the hit is not fetched again."""
    early, long = vision.image("early", position=2, num_tokens=10), vision.image("long", position=40, num_tokens=60)
    cold = await first_of(rig, with_images("hit", 140, early, long))
    await rig.states.flush()
    positions = sorted(int(path.name.split(".")[1]) for path in folders(tmp_path)[0].glob("*.whole"))
    assert [112, 128] == positions
    vision.fetched.clear()
    warm_request = with_images("hit", 140, early, long)
    warm = await first_of(rig, warm_request)

    assert (0, 112) == (cold.cached_tokens, warm.cached_tokens)
    assert [] == vision.fetched
    assert same_as_alone(Alone(rig, vision), warm_request, warm)


async def test_states_inside_an_image_are_saved_before_it(rig, vision, tmp_path):
    """A chunk cannot end there: the newest block boundary before the image takes its place."""
    image = vision.image("wide", position=37, num_tokens=60)
    wanted = with_images("moved", 100, image)
    lengths = chunks_of(rig)
    await first_of(rig, wanted)
    await rig.states.flush()

    assert {"32"} == {path.name.split(".")[1] for path in folders(tmp_path)[0].glob("*.whole")}
    assert 32 in {sum(lengths[:n]) for n in range(len(lengths) + 1)}
    vision.fetched.clear()
    again = await first_of(rig, with_images("moved", 100, image))
    assert (32, [image.content_hash]) == (again.cached_tokens, vision.fetched)
    assert same_as_alone(Alone(rig, vision), wanted, again)


async def test_no_state_is_saved_before_the_windows_are_exact(rig, vision, tmp_path):
    """Without states windows are rebuilt from a distance: where an image moved the save to, they are not yet whole."""
    image = vision.image("late", position=138, num_tokens=40)
    cold = await first_of(rig, with_images("distant", 188, image))
    await rig.states.flush()
    (state,) = folders(tmp_path)[0].glob("*.128.whole")
    state.unlink()
    warm = await first_of(rig, with_images("distant", 188, image))
    await rig.states.flush()

    assert (0, 160 - EXACT) == (cold.cached_tokens, warm.cached_tokens)
    assert [] == [*folders(tmp_path)[0].glob("*.whole")]
    assert same_as_alone(Alone(rig, vision), with_images("distant", 188, image), warm)


async def test_another_image_in_the_same_place_is_no_hit(rig, vision):
    """The same token ids, other pixels: not one block of the first is used."""
    one = await first_of(rig, with_images("pixels", 90, vision.image("cat", position=3, num_tokens=12)))
    await rig.states.flush()
    wanted = with_images("pixels", 90, vision.image("dog", position=3, num_tokens=12))
    two = await first_of(rig, wanted)

    assert (0, 0) == (one.cached_tokens, two.cached_tokens)
    assert same_as_alone(Alone(rig, vision), wanted, two)


async def test_text_before_the_image_and_other_prompts_do_not_wait(rig, vision):
    """While vision is slow, everything else goes on."""
    vision.gate.clear()
    lengths = chunks_of(rig)
    slow = asyncio.create_task(rig.serve(with_images("slow", 60, vision.image("cat", position=30, num_tokens=9))))
    await first_of(rig, request("letters", 40))
    async with asyncio.timeout(20):
        while sum(lengths) != 30 + 40:  # noqa: ASYNC110 - looks at what the engine thread shows
            await asyncio.sleep(0.01)
    vision.gate.set()

    assert ["last_chunk_started", "first_token", "handoff_done"] == kinds(await slow)


@pytest.mark.parametrize("trouble", ["forgotten", "damaged", "gone"])
async def test_lost_embeddings_end_the_request_alone(rig, vision, trouble):
    """BlocksLost: whoever has the image encodes it again. Nothing stays held."""
    image = vision.image("cat", position=30, num_tokens=9)
    if trouble == "forgotten":
        vision.embeddings.clear()
    elif trouble == "damaged":
        vision.damage = lambda chunk: setattr(chunk, "crc32", chunk.crc32 ^ 1)
    else:
        image.vision_address = "127.0.0.1:1"
    events, mate = await asyncio.gather(
        rig.serve(with_images("lost", 60, image)), rig.serve(request("mate", 60, max_tokens=1))
    )

    assert ("BlocksLost", ["first_token"]) == (events[-1].failed.kind, kinds(mate))
    assert 0 == rig.replica.servicer._around.embeddings.room.held_bytes


async def test_cancel_while_vision_is_asked(rig, vision):
    """The fetch ends with the request."""
    vision.gate.clear()
    await rig.submit(with_images("cancel", 60, vision.image("cat", position=0, num_tokens=9)))
    await until(lambda: vision.fetched)
    await rig.cancel("cancel")
    await rig.idle()
    await until(lambda: not rig.replica.servicer._around.embeddings.room.held_bytes)
