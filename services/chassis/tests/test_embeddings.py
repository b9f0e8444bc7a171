"""How do an image's embeddings get from vision to an engine, and how few are held at a time?"""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.common_pb2 import ImageRef, Request
from services.chassis.channel import open_channel
from services.chassis.embeddings import (
    EmbeddingsFetch,
    EmbeddingsRoom,
    EmbeddingsSource,
    ImageFeed,
    fetch_embeddings,
)
from services.chassis.errors import BlocksLost, DeadlinePassed
from services.chassis.tests.memory_vision import memory_vision

HIDDEN = 8
ROW = 4 * HIDDEN


@pytest.fixture
async def vision():
    async with memory_vision(hidden_size=HIDDEN, chunk_bytes=100) as served:
        yield served


@pytest.fixture
async def source():
    channels = []

    def channel(address):
        channels.append(open_channel(address, peer="vision"))
        return channels[-1]

    yield EmbeddingsSource(channel, EmbeddingsRoom(max_bytes=10 * ROW), ROW)
    for each in channels:
        await each.close()


def asked(seconds=30.0):
    return Request(request_id="r", deadline_unix_seconds=time.time() + seconds)


async def fetched(image, source):
    return await asyncio.wait_for(fetch_embeddings(asked(), image, source, timeout_seconds=30), 60)


async def test_pieces_become_the_whole_image(vision, source):
    """Whatever the size of the pieces, all rows arrive in order."""
    image = vision.image("cat", position=3, num_tokens=9)

    assert vision.embeddings[image.content_hash] == await fetched(image, source)


def change(**fields):
    def damage(chunk):
        for name, value in fields.items():
            setattr(chunk, name, value)

    return damage


@pytest.mark.parametrize(
    "damage", [change(data=b"x" * 100), change(offset_bytes=7), change(num_tokens=8), change(image_index=1)]
)
async def test_what_arrives_damaged_is_lost(vision, source, damage):
    """A wrong checksum, place, length or image: the embeddings are never used."""
    vision.damage = damage
    with pytest.raises(BlocksLost, match="damaged"):
        await fetched(vision.image("cat", position=3, num_tokens=9), source)


@pytest.mark.parametrize("trouble", ["forgotten", "longer", "shorter", "another tower", "gone"])
async def test_what_is_not_there_is_lost(vision, source, trouble):
    """Whoever has the image then encodes it again."""
    image = vision.image("cat", position=3, num_tokens=9)
    match trouble:
        case "forgotten":
            vision.embeddings.clear()
        case "longer":
            vision.embeddings[image.content_hash] += bytes(ROW)
        case "shorter":
            vision.embeddings[image.content_hash] = vision.embeddings[image.content_hash][:-ROW]
        case "another tower":
            image.vision_fingerprint = b"w" * 32
        case "gone":
            image.vision_address = "127.0.0.1:1"
    with pytest.raises(BlocksLost):
        await fetched(image, source)


async def test_a_passed_deadline_is_one(vision, source):
    """A slow tower costs no more than the deadline."""
    vision.gate.clear()
    image = vision.image("cat", position=3, num_tokens=9)
    with pytest.raises(DeadlinePassed):
        await fetch_embeddings(asked(), image, source, timeout_seconds=0.1)
    with pytest.raises(DeadlinePassed):
        await fetch_embeddings(asked(), image, source, timeout_seconds=0)


async def test_one_image_takes_the_place_of_the_one_before(vision, source):
    """A request's images come one after the other, and the room is given back at the end."""
    came: list[int] = []
    errors: list[Exception] = []
    fetch = EmbeddingsFetch(asked(), source, deliver=lambda i, e: came.append(i.position), on_error=errors.append)
    for position in (0, 9):
        fetch.want(vision.image(f"cat-{position}", position=position, num_tokens=9))
        async with asyncio.timeout(30):
            while position not in came:  # noqa: ASYNC110 - the fetch runs beside
                await asyncio.sleep(0.005)
        assert 9 * ROW == source.room.held_bytes
    fetch.want(None)
    await asyncio.sleep(0)

    assert (0, []) == (source.room.held_bytes, errors)


async def test_errors_are_told(vision, source):
    """And the room is free again."""
    errors: list[Exception] = []
    fetch = EmbeddingsFetch(asked(), source, deliver=lambda i, e: None, on_error=errors.append)
    image = vision.image("cat", position=0, num_tokens=9)
    vision.embeddings.clear()
    fetch.want(image)
    async with asyncio.timeout(30):
        while not errors:  # noqa: ASYNC110 - the fetch runs beside
            await asyncio.sleep(0.005)

    assert (["BlocksLost"], 0) == ([type(error).__name__ for error in errors], source.room.held_bytes)
    fetch.close()


async def test_the_room_is_first_come_first_served():
    """A large image is not overtaken for ever by small ones, an over-large one is let in alone, cancels free places."""
    room = EmbeddingsRoom(max_bytes=10)
    entered = []

    async def hold(name, num_bytes, until):
        async with room.hold(num_bytes):
            entered.append(name)
            await until.wait()

    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(hold("a", 6, first))]
    tasks += [asyncio.create_task(hold(name, size, rest)) for name, size in (("b", 7), ("c", 7), ("d", 3), ("e", 99))]
    await asyncio.sleep(0)
    assert (["a"], 6) == (entered, room.held_bytes)
    tasks[1].cancel()
    first.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (["a", "c", "d"], 10) == (entered, room.held_bytes)
    rest.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert (["a", "c", "d", "e"], 0) == (entered, room.held_bytes)


def image_at(position, num_tokens):
    return ImageRef(position=position, num_tokens=num_tokens)


def test_text_before_an_image_need_not_wait():
    """Only the tokens from the image on are held back; with its embeddings, those up to the next image are free."""
    first, second = image_at(10, 5), image_at(20, 5)
    feed = ImageFeed([first, second])
    assert feed.move_to(0)
    assert (first, 20) == (feed.current, feed.held_back(0, 30))
    feed.put(first, b"first")
    assert 10 == feed.held_back(0, 30)
    assert () == feed.within(0, 10)
    assert [(10, 5, b"first")] == [(e.position, e.num_tokens, e.embeddings) for e in feed.within(8, 12)]
    assert not feed.move_to(14)
    assert feed.move_to(15)
    assert (second, 10) == (feed.current, feed.held_back(15, 30))
    feed.put(first, b"late")
    assert () == feed.within(20, 25)
    feed.put(second, b"second")
    assert 0 == feed.held_back(15, 30)
    assert feed.move_to(25)
    assert (None, 0) == (feed.current, feed.held_back(25, 30))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), max_size=4), st.integers(0, 40), st.data())
@settings(max_examples=60)
def test_what_is_not_held_back_has_its_embeddings(gaps, tail, data):
    """Step by step, every token of an image is computed with the embeddings of that image at hand, each fetched once."""
    images, end = [], 0
    for gap, length in gaps:
        images.append(image_at(end + gap, length))
        end += gap + length
    num_tokens = end + tail + 1
    start = computed = data.draw(st.integers(0, num_tokens - 1))
    feed, asked_for = ImageFeed(images), []
    while computed < num_tokens:
        if feed.move_to(computed) and feed.current is not None:
            asked_for.append(feed.current)
        ready = num_tokens - computed - feed.held_back(computed, num_tokens)
        if not ready:
            assert feed.current is not None
            feed.put(feed.current, b"here")
            continue
        step = data.draw(st.integers(1, ready))
        inside = {p for i in images for p in range(i.position, i.position + i.num_tokens)}
        given = feed.within(computed, computed + step)
        covered = {p for e in given for p in range(e.position, e.position + e.num_tokens)}
        assert inside & set(range(computed, computed + step)) <= covered
        computed += step

    assert [i for i in images if i.position + i.num_tokens > start] == asked_for
