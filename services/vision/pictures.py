"""How does an encoded image become the pixels that the tower looks at?

Bytes of strangers go through image decoders here. Size and format are known from the header and within limits before
anything is decoded; whatever a decoder then says is the image's fault.

The picture is fitted into the laid-out size with its proportions kept (Pillow's bicubic filter, which also averages
when it makes smaller), centred, and padded with the grey 127. Sizes and offsets equal those of DeepSeek's published
preprocessing; its filter is not documented, and bicubic is what Pillow's own fit-and-pad uses. Transparency is laid on
white, an EXIF orientation is not applied, and of an animation the first frame counts: as in that preprocessing.
"""

from __future__ import annotations

from io import BytesIO

from PIL import Image

from services.chassis.errors import BadImage
from services.chassis.image_headers import ImageHeader
from services.chassis.images import MAX_PIXELS, ImageLayout
from services.chassis.telemetry import log

# The header was checked against the same limit; this one covers what a decoder finds further in.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS

MAX_SCANS = 200
"""Of a progressive JPEG. Real ones have about ten; each scan of a large image costs as much as decoding it."""

_PAD = (127, 127, 127)
_WHITE = (255, 255, 255, 255)
_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}


def pixels_of(data: bytes, header: ImageHeader, layout: ImageLayout) -> bytes:
    """Decode, fit and pad: layout.height rows of layout.width RGB pixels.

    header: what `check_encoded` gave for data.  Raises BadImage for whatever cannot be decoded.  Call it in a thread:
    it holds up to twice the decoded image, and takes up to a second for the largest.
    """
    if header.media_type == "image/jpeg" and data.count(b"\xff\xda") > MAX_SCANS:
        raise BadImage(f"the JPEG has more than {MAX_SCANS} scans", field="messages")
    try:
        return _padded(_decoded(data, header), layout.width, layout.height).tobytes()
    except BadImage:
        raise
    except Exception as error:
        log.info("vision.image.damaged", media_type=header.media_type, error=type(error).__name__)
        raise BadImage(f"the {header.media_type} is damaged and cannot be decoded", field="messages") from error


def _decoded(data: bytes, header: ImageHeader) -> Image.Image:
    with Image.open(BytesIO(data), formats=[_FORMATS[header.media_type]]) as image:
        if image.size != (header.width, header.height):
            raise BadImage(f"the {header.media_type} contradicts itself about its size", field="messages")
        image.load()
        return _rgb(image)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow would cut off at 255
        image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if image.has_transparency_data:
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), above).convert("RGB")
    return image.convert("RGB")


def _padded(image: Image.Image, width: int, height: int) -> Image.Image:
    """Fit into width x height and centre: as PIL.ImageOps.pad does, which fails where a side would become 0."""
    size = width, height
    if image.width * height > width * image.height:
        size = width, max(1, round(image.height / image.width * width))
    elif image.width * height < width * image.height:
        size = max(1, round(image.width / image.height * height)), height
    fitted = image.resize(size, Image.Resampling.BICUBIC)
    if size == (width, height):
        return fitted
    canvas = Image.new("RGB", (width, height), _PAD)
    canvas.paste(fitted, (round((width - size[0]) * 0.5), round((height - size[1]) * 0.5)))
    return canvas
