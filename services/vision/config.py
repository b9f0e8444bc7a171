"""What can the vision service be told?"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from services.chassis.config import ServiceSettings, settings_config


class VisionSettings(ServiceSettings):
    """Settings of one vision replica, FATHOM_VISION_*."""

    service: ClassVar[str] = "vision"
    model_config = settings_config("vision")

    model: Path
    """Folder with the weights, the same as the engines'. A model that takes no images is served by refusing them."""

    dtype: Literal["bf16", "fp32", "int8"] = "bf16"
    """How the tower computes: fp32, or rounded to bf16 as in training. Other bits, so another fingerprint."""

    threads: int = Field(default=2, ge=1)
    """Torch's threads. More than there are free cores makes them wait for each other."""
