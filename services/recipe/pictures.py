"""What becomes of the pictures in a conversation? Base64 to bytes within limits, and their places in the prompt."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from proto.common_pb2 import ImageRef
from services.chassis.errors import BadImage
from services.chassis.images import ImageRules, check_encoded, image_token_ids, layout_of
from services.recipe.conversation import Picture
from services.recipe.dialect import IMAGE_PLACE
from services.recipe.refusals import ApiError, refuse

MAX_PICTURES = 64
MAX_PICTURES_BYTES = 4 << 20
"""Of all pictures in a request, decoded. They ride in one gRPC message, which may have 8 MiB with the prompt's ids."""

DATA_URL, HTTPS_URL = "data:", "https:"
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engines are given: ids, and the images whose places are in them."""

    ids: Sequence[int]
    images: tuple[ImageRef, ...] = ()


def read_url(url: str, where: str) -> Picture:
    """Return the picture of a data: or https: URL; raise a 400 for any other. Nothing is decoded or fetched yet."""
    if url[: len(HTTPS_URL)].lower() == HTTPS_URL:
        return Picture(where, "", url=url)
    head, comma, encoded = url.partition(",") if url.startswith(DATA_URL) else ("", "", "")
    if not comma:
        raise refuse(where, "must be a data: URL with base64, or an https: URL", code="invalid_image_url")
    media_type, *parameters = head.removeprefix(DATA_URL).split(";")
    if media_type.lower() not in MEDIA_TYPES or [p.lower() for p in parameters] != ["base64"]:
        raise refuse(where, f"must begin with data:<type>;base64, where type is {', '.join(MEDIA_TYPES)}")
    return Picture(where, encoded)


def check_size(pictures: Sequence[Picture]) -> None:
    """Raise a 413 when a request has more pictures, or longer ones, than may be decoded."""
    if len(pictures) > MAX_PICTURES:
        raise too_large(f"a request may have {MAX_PICTURES} images, this one has {len(pictures)}")
    # Three bytes in four characters; what the padding leaves is not worth counting.
    if sum(len(picture.encoded) for picture in pictures) > MAX_PICTURES_BYTES // 3 * 4 + 4 * MAX_PICTURES:
        raise too_large()


def place(ids: Sequence[int], pictures: Sequence[Picture], rules: ImageRules | None, vocab_tokens: int) -> Prompt:
    """Return the prompt with every IMAGE_PLACE in `ids` filled by the ids that stand for its picture.

    Pictures are decoded from base64, not into pixels. Raises a 400 naming the one that is no image we take.
    """
    if not pictures:
        return Prompt(ids)
    if rules is None:
        raise refuse(pictures[0].where, "this model takes no images")
    filled: list[int] = []
    images = []
    left = iter(pictures)
    for id_ in ids:
        if id_ != IMAGE_PLACE:
            filled.append(id_)
            continue
        image, image_ids = _open(next(left), rules, vocab_tokens)
        image.position = len(filled)
        images.append(image)
        filled += image_ids
    if len(images) != len(pictures):
        raise RuntimeError(f"the prompt has places for {len(images)} of {len(pictures)} pictures")
    return Prompt(filled, tuple(images))


def _open(picture: Picture, rules: ImageRules, vocab_tokens: int) -> tuple[ImageRef, Sequence[int]]:
    """Return the reference without position, and the ids that stand for the image."""
    try:
        data = picture.data or base64.b64decode(picture.encoded, validate=True)
    except (binascii.Error, ValueError):
        raise refuse(picture.where, "is not base64", code="invalid_image") from None
    try:
        header = check_encoded(data)
        layout = layout_of(header.width, header.height, rules)
    except BadImage as exc:
        raise refuse(picture.where, exc.message, code="invalid_image") from None
    ids = image_token_ids(layout, vocab_tokens)
    digest = hashlib.sha256(data).digest()
    image = ImageRef(content_hash=digest, num_tokens=len(ids), data=data, media_type=header.media_type)
    return image, ids


def too_large(rule: str = f"a request's images may have {MAX_PICTURES_BYTES} bytes together (4 MiB)") -> ApiError:
    """Return the error for more, or longer, pictures than a request may have."""
    return refuse("messages", rule, code="images_too_large", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
