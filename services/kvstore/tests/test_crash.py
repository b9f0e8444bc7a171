"""Is every served block right, whatever a crash or the disk did to the files?"""

import os
import random
import shutil
import zlib
from pathlib import Path

from services.kvstore.directory import segment_files
from services.kvstore.format import ALIGN_BYTES, HEADER_BYTES, footer_bytes, pack_header, record_bytes
from services.kvstore.index import BlockLocation
from services.kvstore.segments import Block, load_segment
from services.kvstore.tests.blocks import FINGERPRINT, block, flip, key, open_store, payload, segments, served

NUMBERS = list(range(8))
SIZE = 6000
RECORD = record_bytes(SIZE)
LOCATIONS = [BlockLocation(key(number), FINGERPRINT, 1, 0, SIZE, 0) for number in NUMBERS]
GOOD = {number: payload(number, SIZE) for number in NUMBERS}


async def fill(folder: Path) -> Path:
    """One sealed segment with eight blocks."""
    store = await open_store(folder)
    for number in NUMBERS:
        await store.write(block(number, SIZE))
    await store.close()
    return segments(folder)[0]


async def reopen(source: Path, folder: Path, damage) -> dict[int, bytes]:
    """Copy a segment, damage the copy, and return what a store on it serves."""
    folder.mkdir()
    copy = folder / source.name
    shutil.copy(source, copy)
    damage(copy)
    store = await open_store(folder)
    found = await served(store, NUMBERS)
    await store.close()
    return found


async def test_a_file_cut_anywhere_serves_only_whole_blocks(tmp_path: Path) -> None:
    """Every block that lies before the cut is found, nothing else, and its bytes are right."""
    path = await fill(tmp_path / "full")
    rng = random.Random(1)
    edges = [0, 1, HEADER_BYTES, RECORD - 1, RECORD, RECORD + 1, 8 * RECORD, path.stat().st_size - 1]
    for cut in [*edges, *(rng.randrange(path.stat().st_size) for _ in range(10))]:
        found = await reopen(path, tmp_path / f"cut{cut}-{rng.random()}", lambda copy, cut=cut: os.truncate(copy, cut))
        whole = [n for n in NUMBERS if n * RECORD + HEADER_BYTES + SIZE <= cut]
        assert {n: GOOD[n] for n in whole} == found, cut


async def test_a_flipped_byte_loses_at_most_its_own_block(tmp_path: Path) -> None:
    """A changed byte in header or payload is that block's miss; in padding or footer it costs nothing."""
    path = await fill(tmp_path / "full")
    rng = random.Random(2)
    size = path.stat().st_size
    places = [0, 8, HEADER_BYTES - 1, HEADER_BYTES, size - 1, size - footer_bytes(LOCATIONS), 8 * RECORD]
    for place in [*places, *(rng.randrange(size) for _ in range(12))]:
        found = await reopen(path, tmp_path / f"flip{place}-{rng.random()}", lambda copy, at=place: flip(copy, at))
        number, within = divmod(place, RECORD)
        is_hit = number < len(NUMBERS) and within < HEADER_BYTES + SIZE
        assert {n: GOOD[n] for n in NUMBERS if not is_hit or n != number} == found, place


async def test_a_tail_of_zeros_is_passed_over(tmp_path: Path) -> None:
    """Room that was made for records which never came is no damage and hides nothing."""
    path = await fill(tmp_path / "full")

    def damage(copy: Path) -> None:
        os.truncate(copy, 6 * RECORD)
        os.truncate(copy, 400 * RECORD)

    assert {n: GOOD[n] for n in range(6)} == await reopen(path, tmp_path / "zeros", damage)

    def zero(copy: Path) -> None:
        with copy.open("r+b") as file:
            file.seek(3 * RECORD)
            file.write(bytes(path.stat().st_size - 3 * RECORD))

    assert {n: GOOD[n] for n in range(3)} == await reopen(path, tmp_path / "zeroed", zero)


async def test_damage_in_an_unsealed_segment_does_not_hide_what_follows(tmp_path: Path) -> None:
    """Without a footer, a scan finds the records behind a damaged header and behind a damaged payload."""
    path = await fill(tmp_path / "full")

    def damage(copy: Path) -> None:
        os.truncate(copy, 8 * RECORD)
        flip(copy, 2 * RECORD + 20)
        flip(copy, 5 * RECORD + HEADER_BYTES + 20)

    found = await reopen(path, tmp_path / "scan", damage)
    assert {n: GOOD[n] for n in NUMBERS if n not in {2, 5}} == found


async def test_random_damage_never_yields_wrong_bytes(tmp_path: Path) -> None:
    """Zeroed ranges, swapped records, garbage at the end, several flips at once: right bytes or a miss."""
    path = await fill(tmp_path / "full")
    rng = random.Random(3)

    def damage(copy: Path) -> None:
        data = bytearray(copy.read_bytes())
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(data))
            end = min(len(data), start + rng.choice([1, 100, 5000, 20_000]))
            other = rng.randrange(9) * RECORD
            data[start:end] = rng.choice(
                [bytes(end - start), rng.randbytes(end - start), data[other : other + end - start]]
            )
        copy.write_bytes(data + rng.choice([b"", rng.randbytes(9000)]))

    for attempt in range(10):
        found = await reopen(path, tmp_path / f"r{attempt}", damage)
        assert {n: GOOD[n] for n in found} == found


async def test_a_payload_that_looks_like_a_record_is_not_taken_for_one(tmp_path: Path) -> None:
    """Even behind a damaged header, bytes a writer chose cannot name a block: they do not know the segment's epoch."""
    inner = BlockLocation(key(77), FINGERPRINT, 1, HEADER_BYTES, 10, 0)
    forged = pack_header(inner, epoch=0) + bytes(ALIGN_BYTES)
    store = await open_store(tmp_path)
    await store.write(Block(key(1), FINGERPRINT, forged, zlib.crc32(forged)))
    await store.write(block(2))
    await store.close()
    path = segments(tmp_path)[0]
    flip(path, 0)
    flip(path, path.stat().st_size - 1)

    store = await open_store(tmp_path)
    assert {2: payload(2)} == await served(store, [1, 2, 77])
    await store.close()


async def test_a_record_of_another_place_or_file_is_not_served(tmp_path: Path) -> None:
    """A whole record that a confused disk put elsewhere, or a renamed file, is a miss."""
    path = await fill(tmp_path / "full")
    data = path.read_bytes()

    found = await reopen(path, tmp_path / "moved", lambda copy: copy.write_bytes(data[RECORD : 8 * RECORD]))
    assert {} == found
    other = tmp_path / "renamed"
    other.mkdir()
    shutil.copy(path, other / f"000000000001-{'0' * 16}-any.seg")
    store = await open_store(other)
    assert {} == await served(store, NUMBERS)
    await store.close()


async def test_a_recovered_segment_is_sealed_for_the_next_start(tmp_path: Path) -> None:
    """A crash costs one scan, not one scan per start."""
    path = await fill(tmp_path)
    os.truncate(path, 4 * RECORD + 5)
    assert not load_segment(segment_files(tmp_path)[0]).is_sealed
    await (await open_store(tmp_path)).close()

    loaded = load_segment(segment_files(tmp_path)[0])
    assert (True, 4) == (loaded.is_sealed, len(loaded.locations))


async def test_foreign_files_stay_untouched(tmp_path: Path) -> None:
    """Only files that bear our names are read or removed."""
    foreign = [tmp_path / "notes.seg", tmp_path / "000000000001-x.seg", tmp_path / "readme"]
    for file in foreign:
        file.write_bytes(b"keep me")
    await (await open_store(tmp_path)).close()

    assert [b"keep me"] * 3 == [file.read_bytes() for file in foreign]


async def test_a_footer_of_another_file_is_not_believed(tmp_path):
    """A sealed segment under another name holds nothing: its epoch says that it is another life's."""
    path = await fill(tmp_path / "full")
    other = tmp_path / "renamed"
    other.mkdir()
    shutil.copy(path, other / f"000000000001-{'0' * 16}-any.seg")
    store = await open_store(other)

    assert 0 == store.num_blocks
    await store.close()
