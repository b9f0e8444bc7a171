"""What can a prefill balancer be told?"""

from typing import ClassVar

from pydantic import Field

from services.chassis.config import ServiceSettings, settings_config


class PrefillLbSettings(ServiceSettings):
    """Settings of one prefill balancer."""

    service: ClassVar[str] = "prefill_lb"
    model_config = settings_config("prefill_lb")

    max_queued_tokens: int = Field(default=1 << 20, ge=1)
    """Prompt tokens that may wait at one replica. A longer queue would outlive its callers' patience: they hear 429."""
