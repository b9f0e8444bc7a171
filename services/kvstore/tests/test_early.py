"""Are blocks found by other replicas while their segment is still open, soon, and without leaving anything behind?"""

import dataclasses

from services.kvstore import pieces
from services.kvstore.blobs import BlobBackend
from services.kvstore.remote import RemoteTier
from services.kvstore.tests.objects import CREATED, FAST, Bucket, paths, payloads, sealed_segment, served, upload


def first(segment, count):
    """A segment as it was when it had so many blocks."""
    return dataclasses.replace(segment, locations=segment.locations[:count])


class Counting(BlobBackend):
    """Counts calls."""

    num_calls = 0

    async def _call(self, *arguments, **more):
        self.num_calls += 1
        return await super()._call(*arguments, **more)


async def test_blocks_of_an_open_segment_are_found_by_others(tmp_path):
    """As they come, in pieces; what is in one is not in the next."""
    bucket = Bucket()
    writer, reader = await bucket.fresh(), await bucket.fresh()
    segment = sealed_segment(tmp_path, range(5))
    await writer.uploads.upload_opened([first(segment, 3)])
    await reader.catalog.hear()
    assert payloads(range(3)) == await served(reader, range(5))
    await writer.uploads.upload_opened([first(segment, 3)])
    await writer.uploads.upload_opened([segment])
    await reader.catalog.hear()

    assert payloads(range(5)) == await served(reader, range(5))
    assert (2, 5) == (writer.uploads.counts.pieces, writer.uploads.counts.blocks)


async def test_a_replica_that_is_lost_before_its_segment_is_sealed_loses_nothing(tmp_path):
    """One that starts later has its pieces, for as long as the blocks live."""
    bucket = Bucket()
    await (await bucket.fresh()).uploads.upload_opened([sealed_segment(tmp_path, range(3))])

    assert payloads(range(3)) == await served(await bucket.fresh(), range(3))


async def test_pieces_go_once_their_segment_is_there(tmp_path):
    """After half a minute, when others have heard of the whole one; readers notice nothing at any moment."""
    bucket = Bucket()
    writer, reader = await bucket.fresh(), await bucket.fresh()
    segment = sealed_segment(tmp_path, range(4))
    await writer.uploads.upload_opened([first(segment, 2)])
    await reader.catalog.hear()
    await upload(writer, segment)
    await writer.uploads.tidy()
    assert payloads(range(2)) == await served(reader, range(4))
    assert 2 == len(await paths(writer, "seg"))
    await reader.catalog.hear()
    bucket.clock.now += 31
    await writer.uploads.tidy()

    assert ["seg/agent/000000000001-0000000000000007"] == await paths(writer, "seg")
    assert 1 == len(await paths(writer, "manifest"))
    for replica in (writer, reader, await bucket.fresh()):
        assert payloads(range(4)) == await served(replica, range(4))


async def test_large_pieces_stay_and_are_uploaded_once(tmp_path, monkeypatch):
    """A busy store does not send its bytes twice."""
    monkeypatch.setattr(pieces, "LARGE_BYTES", 10_000)
    bucket = Bucket()
    writer = await bucket.fresh()
    segment = sealed_segment(tmp_path, range(4))
    await writer.uploads.upload_opened([first(segment, 3)])
    await upload(writer, segment)
    await writer.uploads.tidy(is_last=True)

    assert (4, 2) == (writer.uploads.counts.blocks, len(await paths(writer, "seg")))
    assert payloads(range(4)) == await served(await bucket.fresh(), range(4))


async def test_pieces_of_a_segment_that_is_never_uploaded_stay(tmp_path):
    """It was evicted before its turn: what went up early is all that there is."""
    bucket = Bucket()
    writer = await bucket.fresh()
    segment = sealed_segment(tmp_path, range(3))
    await writer.uploads.upload_opened([first(segment, 2)])
    segment.path.unlink()
    await upload(writer, segment)
    await writer.uploads.tidy(is_last=True)

    assert payloads(range(2)) == await served(await bucket.fresh(), range(3))


async def test_listening_costs_one_call(tmp_path):
    """However much is stored; a manifest that is new costs one more, once."""
    bucket = Bucket()
    backend = Counting(bucket.store, FAST)
    reader = RemoteTier(backend, now=bucket.clock)
    writer = await bucket.fresh()
    for number in range(5):
        await upload(writer, sealed_segment(tmp_path, [number], number=number))
    await reader.catalog.refresh(is_full=True)
    backend.num_calls = 0
    await reader.catalog.hear()
    assert 1 == backend.num_calls
    await upload(writer, sealed_segment(tmp_path, [9], number=9))
    await reader.catalog.hear()
    await reader.catalog.hear()

    assert 4 == backend.num_calls
    assert (1, 0.0) == (reader.catalog.counts.heard_manifests, reader.catalog.heard_after_seconds)


async def test_news_do_not_pile_up(tmp_path):
    """Each replica takes its own back after a while; what one left that was lost, others sweep away."""
    bucket = Bucket()
    writer = await bucket.fresh()
    await upload(writer, sealed_segment(tmp_path, [0]))
    assert 1 == len(await paths(writer, "news"))
    bucket.clock.now += 301
    await writer.catalog.tidy()
    assert [] == await paths(writer, "news")
    await upload(await bucket.fresh(), sealed_segment(tmp_path, [1], number=2, created=CREATED + 301))
    bucket.clock.now += 601
    await writer.catalog.sweep()

    assert [] == await paths(writer, "news")
