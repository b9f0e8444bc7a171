"""Do all kinds of images become the right pixels, and damaged ones a clear refusal?"""

from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from services.chassis.errors import BadImage
from services.chassis.images import ImageRules, check_encoded, layout_of
from services.vision.pictures import pixels_of

RULES = ImageRules(patch_size=14, downsample=3, max_image_tokens=64, min_pixels=7056)
GREY = (127, 127, 127)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def picture(data: bytes) -> Image.Image:
    """What the tower would see."""
    header = check_encoded(data)
    layout = layout_of(header.width, header.height, RULES)
    pixels = pixels_of(data, header, layout)
    return Image.frombytes("RGB", (layout.width, layout.height), pixels)


def centre(data: bytes) -> tuple[int, ...]:
    seen = picture(data)
    found = seen.getpixel((seen.width // 2, seen.height // 2))
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("size", [(100, 60), (60, 100), (95, 66), (84, 84), (300, 200), (1000, 37)])
def test_a_picture_is_fitted_like_pillows_own_pad(size: tuple[int, int]) -> None:
    """Proportions kept, centred, grey around: ImageOps.pad with the bicubic filter, pixel for pixel."""
    image = Image.effect_mandelbrot(size, (-2, -1.5, 1, 1.5), 30).convert("RGB")
    seen = picture(encoded(image))
    expected = ImageOps.pad(image, seen.size, Image.Resampling.BICUBIC, color=GREY)
    assert expected.tobytes() == seen.tobytes()


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (1, 1)])
def test_a_line_keeps_a_pixel(size: tuple[int, int]) -> None:
    """Fitting never makes a side 0."""
    data = encoded(Image.new("RGB", size, (255, 0, 0)))
    assert (255, 0, 0) == max(picture(data).get_flattened_data())


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGB", (90, 90), (10, 20, 30)), (10, 20, 30)),
        (Image.new("L", (90, 90), 77), (77, 77, 77)),
        (Image.new("1", (90, 90), 1), (255, 255, 255)),
        (Image.new("RGBA", (90, 90), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (90, 90), (255, 0, 0, 128)), (255, 127, 127)),
        (Image.new("LA", (90, 90), (100, 128)), (177, 177, 177)),
        (Image.new("I;16", (90, 90), 30000), (117, 117, 117)),
        (Image.new("I;16", (90, 90), 65535), (255, 255, 255)),
    ],
)
def test_every_png_mode_is_read(image: Image.Image, expected: tuple[int, int, int]) -> None:
    """Grey becomes RGB, 16 bits become 8, and transparency is laid on white."""
    assert expected == centre(encoded(image))


def test_a_palette_and_its_transparent_entry() -> None:
    """An index means its colour; the transparent one means white."""
    image = Image.new("P", (90, 90), 3)
    image.putpalette([value for index in range(256) for value in (index, 2 * index % 256, 9)])
    assert (3, 6, 9) == centre(encoded(image))
    assert (255, 255, 255) == centre(encoded(image, transparency=3))


def test_cmyk_and_progressive_jpeg() -> None:
    """What printers and web pages use."""
    assert (229, 204, 179) == pytest.approx(
        centre(encoded(Image.new("CMYK", (90, 90), (26, 51, 76, 0)), "JPEG")), abs=3
    )
    grey = Image.new("RGB", (90, 90), (40, 50, 60))
    assert (40, 50, 60) == pytest.approx(centre(encoded(grey, "JPEG", progressive=True)), abs=3)


def test_webp_with_and_without_loss() -> None:
    """VP8, VP8L and, with transparency, VP8X."""
    image = Image.new("RGB", (90, 90), (40, 50, 60))
    assert (40, 50, 60) == pytest.approx(centre(encoded(image, "WEBP")), abs=3)
    assert (40, 50, 60) == centre(encoded(image, "WEBP", lossless=True))
    assert (255, 127, 127) == centre(encoded(Image.new("RGBA", (90, 90), (255, 0, 0, 128)), "WEBP", lossless=True))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    """A moving picture is no error."""
    first, second = Image.new("RGB", (90, 90), (0, 0, 255)), Image.new("RGB", (90, 90), (255, 0, 0))
    data = encoded(first, kind, save_all=True, append_images=[second], lossless=True)
    assert (0, 0, 255) == centre(data)


def test_orientation_is_not_applied() -> None:
    """A tag that says "turn me" changes nothing: the layout comes from the size as stored."""
    turned = Image.Exif()
    turned[0x0112] = 6
    assert picture(encoded(Image.new("RGB", (120, 90)), "JPEG", exif=turned)).width > 90


SAMPLES = tuple(
    encoded(Image.effect_noise((90, 70), 60).convert("RGB"), kind, **options)
    for kind, options in (("PNG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True}))
)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_truncated_image_is_refused(sample: bytes, share: float) -> None:
    """Half a picture is not guessed at."""
    with pytest.raises(BadImage, match="damaged"):
        picture(sample[: int(len(sample) * share)])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4))
def test_damage_is_a_refusal_or_a_picture(sample: bytes, changes: list[tuple[int, int]]) -> None:
    """Whatever bytes come, the caller hears BadImage or gets pixels: nothing else leaves."""
    data = bytearray(sample)
    for place, value in changes:
        data[place % len(data)] = value
    with suppress(BadImage):
        header = check_encoded(bytes(data))
        if header.width * header.height < 1_000_000:
            picture(bytes(data))


def test_too_many_scans_are_refused() -> None:
    """A small progressive file can ask for hours of work."""
    data = encoded(Image.new("RGB", (90, 90)), "JPEG")
    with pytest.raises(BadImage, match="scans"):
        picture(data + b"\xff\xda" * 300)


def test_a_second_size_further_in_is_refused() -> None:
    """The limits were checked on the header's size: a file that later claims another one is not decoded."""
    data = encoded(Image.new("RGB", (90, 90)), "JPEG")
    at = data.index(b"\xff\xc0")
    frame = bytearray(data[at : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")])
    frame[5:9] = (200).to_bytes(2, "big") * 2
    with pytest.raises(BadImage, match="contradicts itself"):
        picture(data[: at + len(frame)] + frame + data[at + len(frame) :])
