"""What do blocks look like between a prefill and a decode replica?"""

import subprocess
import sys

import pytest

from proto.common_pb2 import Ticket
from services.chassis.errors import BlocksLost, InvalidRequest
from services.chassis.handoff import (
    CHUNK_BYTES,
    Staging,
    StagingFolder,
    StagingUnavailableError,
    block_crc32,
    check_chunk,
    chunks_of,
    fill_staging,
    remove_dead_folders,
)

NONCE = bytes(range(16))


def staged(folder, num_blocks=2, block_bytes=100):
    return Staging(nonce=NONCE, num_blocks=num_blocks, block_bytes=block_bytes, folder=folder)


def fill(path, payloads, *, nonce=NONCE, num_blocks=2, first_block=0):
    return fill_staging(
        str(path), nonce=nonce, num_blocks=num_blocks, block_bytes=100, first_block=first_block, payloads=payloads
    )


def test_what_one_side_fills_the_other_reads(tmp_path):
    """Bytes and checksums agree on both sides of the file."""
    staging = staged(tmp_path)
    blocks = [b"a" * 100, b"b" * 100]

    crcs = fill(staging.path, blocks[:1]) + fill(staging.path, blocks[1:], first_block=1)

    assert blocks == [staging.read(0), staging.read(1)]
    assert crcs == [block_crc32(block) for block in blocks]
    staging.close()


def test_the_file_is_private_and_begins_with_the_nonce(tmp_path):
    """Nobody else can read it, and a peer can tell whose it is."""
    staging = staged(tmp_path)

    assert 0o600 == staging.path.stat().st_mode & 0o777
    assert NONCE == staging.path.read_bytes()[:16]
    staging.close()


def test_a_file_of_another_ticket_is_refused(tmp_path):
    """Wrong nonce, wrong size or no file: the sender falls back instead of writing."""
    staging = staged(tmp_path)
    for path, nonce, num_blocks in (
        (staging.path, bytes(16), 2),
        (staging.path, NONCE, 3),
        (tmp_path / "elsewhere", NONCE, 2),
    ):
        with pytest.raises(StagingUnavailableError):
            fill(path, [b"x" * 100], nonce=nonce, num_blocks=num_blocks)
    assert bytes(100) == staging.read(0)
    staging.close()


def test_closing_removes_the_file_and_late_writes_are_harmless(tmp_path):
    """After the receiver gave the place back, a late writer finds nothing."""
    staging = staged(tmp_path)
    path = staging.path
    staging.close()

    assert [] == list(tmp_path.iterdir())
    with pytest.raises(StagingUnavailableError):
        fill(path, [b"x" * 100])


def test_without_a_folder_it_is_plain_memory():
    """Push needs no shared memory."""
    staging = staged(None)
    staging.write(1, 40, b"middle")

    assert staging.path is None
    assert b"middle" == staging.read(1)[40:46]
    staging.close()


@pytest.mark.parametrize(("block", "offset", "size"), [(2, 0, 1), (-1, 0, 1), (0, 99, 2), (1, 100, 1)])
def test_pieces_outside_the_reservation_are_refused(block, offset, size):
    """A piece can never reach a neighbour's block."""
    staging = staged(None)
    with pytest.raises(InvalidRequest):
        staging.write(block, offset, b"x" * size)
    staging.close()


def test_blocks_are_cut_into_pieces_with_checksums():
    """Pieces put together are the block; the ticket goes with the first only."""
    payload = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail"
    chunks = list(chunks_of(payload, block_index=3, ticket=Ticket(epoch=5)))

    assert payload == b"".join(chunk.data for chunk in chunks)
    assert [0, CHUNK_BYTES] == [chunk.offset_bytes for chunk in chunks]
    assert [True, False] == [chunk.HasField("ticket") for chunk in chunks]
    for chunk in chunks:
        check_chunk(chunk)
    chunks[1].data = b"taim"
    with pytest.raises(BlocksLost):
        check_chunk(chunks[1])


@pytest.mark.parametrize("num_blocks", [0, 2])
def test_the_window_lies_behind_the_blocks(tmp_path, num_blocks):
    """Written last, also when no block travels; a sender that reckons with another size is refused."""
    staging = Staging(nonce=NONCE, num_blocks=num_blocks, block_bytes=100, window_bytes=50, folder=tmp_path)
    blocks, window = [b"a" * 100, b"b" * 100][:num_blocks], b"w" * 50
    asked = {"nonce": NONCE, "num_blocks": num_blocks, "block_bytes": 100, "first_block": 0}
    with pytest.raises(StagingUnavailableError):
        fill_staging(str(staging.path), payloads=blocks, **asked)
    crcs = fill_staging(str(staging.path), payloads=blocks, window_bytes=50, **asked)
    crcs += fill_staging(str(staging.path), payloads=[], window_bytes=50, window=window, **asked)

    assert [*blocks, window] == [*(staging.read(n) for n in range(num_blocks)), staging.read_window()]
    assert [block_crc32(payload) for payload in (*blocks, window)] == crcs
    staging.close()


def test_window_pieces_stay_in_the_window():
    """They reach no block, and nothing behind the window."""
    staging = Staging(nonce=NONCE, num_blocks=1, block_bytes=100, window_bytes=50, folder=None)
    for chunk in chunks_of(b"w" * 50, ticket=None, is_window=True):
        assert chunk.is_window
        check_chunk(chunk)
        staging.write_window(chunk.offset_bytes, chunk.data)
    with pytest.raises(InvalidRequest):
        staging.write_window(1, b"w" * 50)
    with pytest.raises(InvalidRequest):
        staging.write(0, 90, b"x" * 20)

    assert (bytes(100), b"w" * 50) == (staging.read(0), staging.read_window())
    staging.close()


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path):
    """A crash leaves no shared memory behind for longer than the next start."""
    script = (
        "import os, pathlib, sys; from services.chassis.handoff import StagingFolder;"
        "f = StagingFolder('dead', root=pathlib.Path(sys.argv[1])); (f.path / 'x').write_bytes(b'x'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert ["fathom-dead"] == [path.name for path in tmp_path.iterdir()]

    living = StagingFolder("living", root=tmp_path)

    assert [living.path] == list(tmp_path.iterdir())
    assert [] == remove_dead_folders(tmp_path)
    assert 0o700 == living.path.stat().st_mode & 0o777
    living.close()
    assert [] == list(tmp_path.iterdir())
