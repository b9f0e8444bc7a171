"""What is an encoded image allowed to be, and which places does it fill in a prompt?

No pixel is decoded here: format and size are read from the header, and the number of tokens follows from the size. The
recipe lays out the prompt by these rules and the vision service encodes by them, so the two always agree.

The rule (a DeepSeek-V4.1 image becomes rows of merged patches between a start and an end mark, a newline mark after
each row) and its arithmetic, float rounding included, are those of DeepSeek's published preprocessing: the golden
layouts and the deepseek-recipe library give the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, sqrt
from typing import Any

from services.chassis.errors import BadImage
from services.chassis.image_headers import ImageHeader, read_header

MAX_ENCODED_BYTES = 20 << 20
"""Of one encoded image."""

MAX_PIXELS = 50_000_000
"""Of one decoded image: 150 MB of RGB. A small file can claim more than a machine has memory."""

_MAX_ROUNDS = 50
"""The rule's fixed point is reached within 10; more would mean a config that has none."""


class Kind(IntEnum):
    """What stands at one place of an image."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True)
class ImageRules:
    """What of a model's vision_config decides how an image is laid out."""

    patch_size: int
    """Pixels per side of a patch."""
    downsample: int
    """Patches per side of one image token."""
    max_image_tokens: int
    """Most places one image may fill, marks included."""
    min_pixels: int
    """Smaller images are enlarged to about this many."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """An image's size as the tower sees it, and its places in the prompt."""

    width: int
    """Pixels, whole patches; the picture is fitted in and the rest padded."""
    height: int
    patches_wide: int
    patches_high: int
    tokens_wide: int
    """Image tokens per row, without the newline."""
    tokens_high: int

    @property
    def num_tokens(self) -> int:
        """Places in the prompt: start, rows with a newline each, end."""
        return self.tokens_high * (self.tokens_wide + 1) + 2

    def kinds(self) -> tuple[Kind, ...]:
        """What stands at each place, in order."""
        row = (Kind.IMAGE,) * self.tokens_wide + (Kind.NEWLINE,)
        return (Kind.START, *row * self.tokens_high, Kind.END)


def read_rules(config: Mapping[str, Any]) -> ImageRules | None:
    """Return the rules of a model by its config.json; None for a model without a vision tower.

    Raises ValueError for a vision_config whose values cannot be rules.
    """
    vision = config.get("vision_config")
    if vision is None:
        return None
    names = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels")
    try:
        values = [int(vision[name]) for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"vision_config must have whole numbers {', '.join(names)}: {error!r}") from None
    if min(values) < 1 or values[2] < _FEWEST_TOKENS:
        raise ValueError(f"vision_config has a value below its least: {dict(zip(names, values, strict=True))}")
    return ImageRules(*values)


_FEWEST_TOKENS = 4
"""Start, one image token, its newline, end."""


def check_encoded(data: bytes) -> ImageHeader:
    """Return format and size of an image that may be decoded. Raises BadImage: too large, or not an image we take."""
    if len(data) > MAX_ENCODED_BYTES:
        raise BadImage(
            f"the image has {len(data)} bytes; at most {MAX_ENCODED_BYTES} are taken (20 MiB)", field="messages"
        )
    header = read_header(data)
    if header.width * header.height > MAX_PIXELS:
        raise BadImage(
            f"the image has {header.width} x {header.height} pixels; at most {MAX_PIXELS} in all are taken",
            field="messages",
        )
    return header


def layout_of(width: int, height: int, rules: ImageRules) -> ImageLayout:
    """Return how an image of width x height pixels (each at least 1) is laid out.

    A size that is chosen may itself be below min_pixels (its sides are rounded), so the rule is applied to its own
    result until nothing changes, as in the published code. Raises BadImage when it never settles.
    """
    size = width, height
    for _ in range(_MAX_ROUNDS):
        chosen = _fit(*size, rules)
        if chosen == size:
            return _layout(*size, rules)
        size = chosen
    raise BadImage(f"an image of {width} x {height} pixels fits no size that the model takes", field="messages")


def image_token_ids(layout: ImageLayout, vocab_tokens: int) -> tuple[int, ...]:
    """Return what stands for an image in the prompt: ids beyond the vocabulary, which only name its places."""
    return (vocab_tokens + 2, *(vocab_tokens + 1,) * (layout.num_tokens - 1))


def _layout(width: int, height: int, rules: ImageRules) -> ImageLayout:
    wide, high = width // rules.patch_size, height // rules.patch_size
    return ImageLayout(width, height, wide, high, ceil(wide / rules.downsample), ceil(high / rules.downsample))


def _fit(width: int, height: int, rules: ImageRules) -> tuple[int, int]:
    """Apply the rule once: enlarge to min_pixels, round up to patches, or shrink to what the tokens allow."""
    patch, token = rules.patch_size, rules.patch_size * rules.downsample
    if width * height < rules.min_pixels:
        scale = sqrt(rules.min_pixels / (width * height))
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
    rounded = ceil(width / patch) * patch, ceil(height / patch) * patch
    budget = rules.max_image_tokens - 2
    if _layout(*rounded, rules).num_tokens - 2 <= budget:
        return rounded
    # rows * (columns + 1) = budget with columns = ratio * rows, solved for rows.
    ratio = width / height
    rows = (-1 + sqrt(1 + 4 * ratio * budget)) / (2 * ratio)
    columns = ratio * rows
    if columns < 1:
        return token, budget // 2 * token
    if rows < 1:
        return (budget - 1) * token, token
    scale = min(int(columns) * token / width, int(rows) * token / height)
    # The truncation may lose a patch to float error (41.99999): kept, because everyone's token counts have it.
    return max(1, int(width * scale / patch)) * patch, max(1, int(height * scale / patch)) * patch
