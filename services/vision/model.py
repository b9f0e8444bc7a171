"""How does the vision tower get ready, if the model has one?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.chassis.images import ImageRules

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.models.vision import ImageEncoder
    from services.vision.config import VisionSettings

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sight:
    """A loaded tower, and how its images are laid out."""

    tower: ImageEncoder
    rules: ImageRules


def describes_tower(model: Path) -> bool:
    """Say whether a model folder has a vision tower, without importing torch: most models have none.

    Raises FileNotFoundError for a folder without a model, which may still be on its way.
    """
    described = model / "config.json"
    if described.is_file():
        return json.loads(described.read_text(encoding="utf-8")).get("vision_config") is not None
    if model.suffix == ".gguf" and model.is_file():
        return False
    if any(model.glob("*.gguf")):
        return False
    raise FileNotFoundError(f"{model} holds no model: neither config.json nor a GGUF file")


def load_sight(settings: VisionSettings, progress: Progress) -> Sight | None:
    """Read the tower's weights; None for a model that takes no images. Takes seconds: for the engine thread.

    Raises FileNotFoundError, and what `load_encoder` raises.
    """
    if not describes_tower(settings.model):
        return None
    from kernels.models.vision import load_encoder

    tower = load_encoder(settings.model, dtype=settings.dtype, threads=settings.threads, progress=progress)
    if tower is None:
        return None
    vision = tower.config
    return Sight(tower, ImageRules(vision.patch_size, vision.downsample, vision.max_image_tokens, vision.min_pixels))
