"""Which format and size does an encoded image claim? Read from its header, nothing is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from services.chassis.errors import BadImage


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an encoded image says of itself."""

    media_type: str
    """ "image/png", "image/jpeg" or "image/webp": by its first bytes, whatever the caller called it."""
    width: int
    """Pixels as stored, at least 1; an EXIF orientation does not turn them."""
    height: int


def read_header(data: bytes) -> ImageHeader:
    """Return format and size. Raises BadImage for another format, a header that ends early, or a size of nothing."""
    if data.startswith(_PNG):
        media_type, size = "image/png", _png_size(data)
    elif data.startswith(b"\xff\xd8\xff"):
        media_type, size = "image/jpeg", _jpeg_size(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        media_type, size = "image/webp", _webp_size(data)
    else:
        raise BadImage("the image is neither PNG nor JPEG nor WebP", field="messages")
    if size is None:
        raise BadImage(f"the {media_type} is damaged: its header is not complete", field="messages")
    if 0 in size:
        raise BadImage(f"the {media_type} says it is {size[0]} x {size[1]} pixels", field="messages")
    return ImageHeader(media_type, *size)


_PNG = b"\x89PNG\r\n\x1a\n"
# Start-of-frame markers; C4, C8 and CC between them mean other things.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset(range(0xD0, 0xD9)) | {0x01}
_JPEG_ENDS = frozenset({0xD9, 0xDA})

_Size = tuple[int, int] | None


def _png_size(data: bytes) -> _Size:
    if len(data) < 33 or data[8:16] != b"\x00\x00\x00\x0dIHDR":
        return None
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _jpeg_size(data: bytes) -> _Size:
    """Walk the segments to the frame header; each step moves on, so the walk ends with the data."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
            continue
        if marker in _JPEG_BARE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _JPEG_ENDS or length < 2:
            return None
        if marker in _JPEG_FRAMES:
            frame = data[at + 5 : at + 9]
            return (int.from_bytes(frame[2:], "big"), int.from_bytes(frame[:2], "big")) if len(frame) == 4 else None
        at += 2 + length
    return None


def _webp_size(data: bytes) -> _Size:
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X" and len(body) == 10:
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8 " and len(body) == 10 and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    if kind == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return None
