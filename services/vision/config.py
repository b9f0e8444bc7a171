"""What can the vision service be told?"""

from typing import ClassVar

from services.chassis.config import ServiceSettings, settings_config


class VisionSettings(ServiceSettings):
    """Settings of the vision service, FATHOM_VISION_*: only those every service has."""

    service: ClassVar[str] = "vision"
    model_config = settings_config("vision")
