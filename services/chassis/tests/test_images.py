"""Is an image's header read right, and does its size give the places that the model fills?"""

import json
import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis.errors import BadImage
from services.chassis.image_headers import ImageHeader, read_header
from services.chassis.images import (
    MAX_ENCODED_BYTES,
    ImageRules,
    Kind,
    check_encoded,
    image_token_ids,
    layout_of,
    read_rules,
)

GOLDEN = Path(__file__).resolve().parents[3] / "kernels" / "tests" / "golden" / "golden.json"
REAL = ImageRules(patch_size=14, downsample=3, max_image_tokens=1024, min_pixels=295_936)
TINY = ImageRules(patch_size=14, downsample=3, max_image_tokens=64, min_pixels=7056)


def golden(key: str):
    return json.loads(GOLDEN.read_text())["data"][key]


def test_layouts_equal_the_golden_ones() -> None:
    """Sizes, grids and token counts of small, large, thin and exact images."""
    for case in golden("vision/vision_layout_real"):
        layout = layout_of(case["width"], case["height"], REAL)
        expected = [case[name] for name in ("best_width", "best_height", "n_vit_w", "n_vit_h", "n_llm_w", "n_llm_h")]
        assert expected == [
            layout.width, layout.height, layout.patches_wide, layout.patches_high, layout.tokens_wide, layout.tokens_high,
        ]  # fmt: skip
        assert case["tokens"] == layout.num_tokens == len(layout.kinds())


def test_kinds_equal_the_golden_ones() -> None:
    """Start, rows with a newline each, end."""
    described = golden("vision/vision")
    high, wide = described["grid"]
    layout = layout_of(wide * 14, high * 14, ImageRules(14, 3, 64, min_pixels=1))
    assert described["kinds"] == [kind.name.lower() for kind in layout.kinds()]


def test_token_counts_equal_the_published_library() -> None:
    """Another implementation, from DeepSeek: sizes over five decades, float rounding included."""
    library = pytest.importorskip("deepseek_recipe", reason="the deepseek extra is not installed")
    sizes = random.Random(20)
    for _ in range(3000):
        width, height = (int(10 ** sizes.uniform(0, 5)) for _ in range(2))
        adjustment = library.MultiModalData([library.ImageInfo(b"", width, height)]).image_token_adjustment()
        assert adjustment + 1 == layout_of(width, height, REAL).num_tokens, (width, height)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60_000), st.integers(1, 60_000), st.sampled_from([REAL, TINY]))
def test_a_layout_is_within_limits_and_its_own_layout(width: int, height: int, rules: ImageRules) -> None:
    """Never more tokens than allowed, whole patches, and a picture already of that size stays as it is."""
    layout = layout_of(width, height, rules)
    assert layout.num_tokens <= rules.max_image_tokens
    assert (0, 0) == (layout.width % rules.patch_size, layout.height % rules.patch_size)
    assert layout == layout_of(layout.width, layout.height, rules)


def test_ids_name_the_first_place_and_the_others() -> None:
    """Beyond the vocabulary: vocab + 2, then vocab + 1."""
    layout = layout_of(70, 98, ImageRules(14, 3, 64, min_pixels=1))
    assert (322, *(321,) * (layout.num_tokens - 1)) == image_token_ids(layout, 320)
    assert Kind.START == layout.kinds()[0]


def test_rules_come_from_the_config() -> None:
    """No vision_config means no images; half a one is an error that names what is needed."""
    vision = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 7056}
    assert read_rules({}) is None
    assert TINY == read_rules({"vision_config": vision})
    with pytest.raises(ValueError, match="min_pixels"):
        read_rules({"vision_config": {**vision, "min_pixels": None}})
    with pytest.raises(ValueError, match="below its least"):
        read_rules({"vision_config": {**vision, "max_image_tokens": 3}})


def png(width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


def jpeg(width: int, height: int, marker: int = 0xC0) -> bytes:
    segments = b"\xff\xe0\x00\x10" + bytes(14) + b"\xff\xff\xff\xc4\x00\x03\x00"  # APP0, padding, a table
    return b"\xff\xd8" + segments + bytes([0xFF, marker]) + b"\x00\x11\x08" + struct.pack(">HH", height, width)


def webp(chunk: bytes, body: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 100) + b"WEBP" + chunk + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(640, 480), ImageHeader("image/png", 640, 480)),
        (jpeg(640, 480), ImageHeader("image/jpeg", 640, 480)),
        (jpeg(640, 480, 0xC2), ImageHeader("image/jpeg", 640, 480)),
        (webp(b"VP8 ", b"\x00\x00\x00\x9d\x01\x2a" + struct.pack("<HH", 640, 480 | 0x4000)), ImageHeader("image/webp", 640, 480)),
        (webp(b"VP8L", b"\x2f" + struct.pack("<I", 639 | 479 << 14) + bytes(5)), ImageHeader("image/webp", 640, 480)),
        (webp(b"VP8X", bytes(4) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")), ImageHeader("image/webp", 640, 480)),
    ],
)  # fmt: skip
def test_size_is_read_from_every_kind_of_header(data: bytes, expected: ImageHeader) -> None:
    """Nothing behind the header is needed."""
    assert expected == read_header(data)


@pytest.mark.parametrize("data", [png(640, 480), jpeg(640, 480), webp(b"VP8L", b"\x2f" + bytes(4))])
def test_a_header_that_ends_early_is_refused(data: bytes) -> None:
    """At every length: refused with words, never another error."""
    for length in range(len(data)):
        with pytest.raises(BadImage):
            read_header(data[:length])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "neither PNG nor JPEG nor WebP"),
        (b"GIF89a" + bytes(20), "neither PNG nor JPEG nor WebP"),
        (b"<svg/>", "neither PNG nor JPEG nor WebP"),
        (png(0, 480), "0 x 480"),
        (jpeg(640, 0), "640 x 0"),
        (b"\xff\xd8\xff\xda" + bytes(20), "damaged"),
        (b"\xff\xd8" + b"\xff\xe0\x00\x00" * 20, "damaged"),
    ],
)
def test_what_is_no_image_is_refused_by_name(data: bytes, words: str) -> None:
    """The caller learns what is wrong with it."""
    with pytest.raises(BadImage, match=words) as refused:
        read_header(data)
    assert "messages" == refused.value.field


def test_limits_are_checked_before_anything_is_decoded() -> None:
    """20 MiB encoded, 50 megapixels decoded: both known from the first bytes."""
    assert ImageHeader("image/png", 10_000, 5_000) == check_encoded(png(10_000, 5_000))
    with pytest.raises(BadImage, match="20000 x 20000"):
        check_encoded(png(20_000, 20_000))
    with pytest.raises(BadImage, match="10000 x 5001"):
        check_encoded(png(10_000, 5_001))
    with pytest.raises(BadImage, match="20 MiB"):
        check_encoded(png(1, 1) + bytes(MAX_ENCODED_BYTES))
