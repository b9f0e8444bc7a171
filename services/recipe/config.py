"""What can the recipe be told?"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.chassis.config import ServiceSettings, settings_config


class RecipeSettings(ServiceSettings):
    """Settings of the public API front."""

    model_config = settings_config("recipe")
    service: ClassVar[str] = "recipe"

    model: Path
    """Folder with the model's tokenizer.json, config.json and chat template; weights are not read. Required."""

    model_name: str = ""
    """What callers ask for; empty takes "name" of the folder's fathom.json, else the folder's own name."""

    entrypoint_address: str = Field(pattern=r"^\S+:\d{1,5}$")
    """host:port of the entrypoint. Required."""

    public_listen: str = Field(default="127.0.0.1:8000", pattern=r"^\S+:\d{1,5}$")
    """host:port of the HTTP API. Loopback, because this version checks no API keys."""

    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """Longest request body, in bytes; a million token ids as JSON are about seven million."""
