"""What can a decode balancer be told?"""

from typing import ClassVar

from pydantic import Field

from services.chassis.config import ServiceSettings, settings_config


class DecodeLbSettings(ServiceSettings):
    """Settings of one decode balancer."""

    service: ClassVar[str] = "decode_lb"
    model_config = settings_config("decode_lb")

    full_batch: int = Field(default=32, ge=1)
    """Sequences that weigh as much as a full KV pool: the replicas' own largest batch."""
