"""What do blocks look like between a prefill and a decode replica?"""

import errno
import subprocess
import sys
import zlib

import pytest

from services.chassis.errors import InvalidRequest
from services.chassis.handoff import (
    PeerStaging,
    Staging,
    StagingFolder,
    StagingUnavailableError,
    block_crc32,
    remove_dead_folders,
)

NONCE = bytes(range(16))


def staged(folder, num_blocks=2, block_bytes=100):
    return Staging(nonce=NONCE, num_blocks=num_blocks, block_bytes=block_bytes, folder=folder)


def mapped(path, *, nonce=NONCE, num_blocks=2, block_bytes=100, window_bytes=0):
    return PeerStaging(
        str(path), nonce=nonce, num_blocks=num_blocks, block_bytes=block_bytes, window_bytes=window_bytes
    )


def test_what_one_side_fills_the_other_reads(tmp_path):
    """Bytes written through one mapping are seen through the other."""
    staging = staged(tmp_path)
    blocks = [b"a" * 100, b"b" * 100]
    theirs = mapped(staging.path)
    for place, block in enumerate(blocks):
        theirs.block(place)[:] = block

    assert theirs.close()
    assert blocks == [staging.block(0), staging.block(1)]
    staging.close()


def test_whoever_let_go_of_the_file_cannot_write_any_more(tmp_path):
    """What is committed cannot change: closing says no while somebody still could write, and takes the file away."""
    staging = staged(tmp_path)
    theirs = mapped(staging.path)
    place = theirs.block(0)
    assert not theirs.close()
    place.release()

    assert theirs.close()
    with pytest.raises(ValueError, match="closed"):
        theirs.block(0)
    staging.close()


def test_the_receiver_may_still_read_while_it_closes(tmp_path):
    """A view that the engine holds keeps the memory, not the file."""
    staging = staged(tmp_path)
    view = staging.block(1)
    staging.close()

    assert [] == list(tmp_path.iterdir())
    assert bytes(100) == view


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
            mapped(path, nonce=nonce, num_blocks=num_blocks)
    assert bytes(100) == staging.block(0)
    staging.close()


def test_closing_removes_the_file_and_late_writes_are_harmless(tmp_path):
    """After the receiver gave the place back, a late writer finds nothing, or writes what nobody reads."""
    staging = staged(tmp_path)
    path, late = staging.path, mapped(staging.path)
    staging.close()
    late.block(0)[:] = b"x" * 100

    assert [] == list(tmp_path.iterdir())
    with pytest.raises(StagingUnavailableError):
        mapped(path)
    again = Staging(nonce=NONCE, num_blocks=2, block_bytes=100, folder=tmp_path)
    late.block(1)[:] = b"x" * 100
    assert [bytes(100)] * 2 == [again.block(0), again.block(1)]
    again.close()


def test_without_a_folder_it_is_plain_memory():
    """Push needs no shared memory."""
    staging = staged(None)
    staging.write(1, 40, b"middle")

    assert staging.path is None
    assert b"middle" == staging.block(1)[40:46]
    staging.close()


@pytest.mark.parametrize(("block", "offset", "size"), [(2, 0, 1), (-1, 0, 1), (0, 99, 2), (1, 100, 1)])
def test_pieces_outside_the_reservation_are_refused(block, offset, size):
    """A piece can never reach a neighbour's block."""
    staging = staged(None)
    with pytest.raises(InvalidRequest):
        staging.write(block, offset, b"x" * size)
    staging.close()


@pytest.mark.parametrize("num_blocks", [0, 2])
def test_the_window_lies_behind_the_blocks(tmp_path, num_blocks):
    """Written last, also when no block travels; a sender that reckons with another size is refused."""
    staging = Staging(nonce=NONCE, num_blocks=num_blocks, block_bytes=100, window_bytes=50, folder=tmp_path)
    blocks, window = [b"a" * 100, b"b" * 100][:num_blocks], b"w" * 50
    with pytest.raises(StagingUnavailableError):
        mapped(staging.path, num_blocks=num_blocks)
    theirs = mapped(staging.path, num_blocks=num_blocks, window_bytes=50)
    for place, block in enumerate(blocks):
        theirs.block(place)[:] = block
    theirs.window()[:] = window

    assert [*blocks, window] == [*(staging.block(n) for n in range(num_blocks)), staging.window()]
    assert theirs.close()
    staging.close()


def test_window_pieces_stay_in_the_window():
    """They reach no block, and nothing behind the window."""
    staging = Staging(nonce=NONCE, num_blocks=1, block_bytes=100, window_bytes=50, folder=None)
    for offset in (0, 30):
        staging.write_window(offset, b"w" * (30 - offset // 3))
    with pytest.raises(InvalidRequest):
        staging.write_window(1, b"w" * 50)
    with pytest.raises(InvalidRequest):
        staging.write(0, 90, b"x" * 20)

    assert [bytes(100), b"w" * 50] == [bytes(staging.block(0)), bytes(staging.window())]
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


def test_a_full_file_system_is_an_error_and_leaves_nothing(tmp_path):
    """Found when the room is made, not by a SIGBUS when it is filled."""
    script = (
        "import pathlib, resource, sys; from services.chassis.handoff import Staging;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); folder = pathlib.Path(sys.argv[1]);"
        "\ntry: Staging(nonce=bytes(16), num_blocks=100, block_bytes=1000, folder=folder)"
        "\nexcept OSError as error: print(error.errno, list(folder.iterdir()))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False, timeout=60)

    assert f"{errno.EFBIG} []" == done.stdout.decode().strip()


def test_the_checksum_is_the_one_everybody_knows():
    """CRC-32 as zlib and gzip have it, on whatever holds bytes."""
    payload = bytes(range(256)) * 50

    assert zlib.crc32(payload) == block_crc32(payload) == block_crc32(memoryview(bytearray(payload)))
