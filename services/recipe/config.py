"""What can the recipe be told?"""

import ipaddress
from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from services.chassis.config import ServiceSettings, settings_config
from services.recipe.image_urls import read_rules


class RecipeSettings(ServiceSettings):
    """Settings of the public API front."""

    model_config = settings_config("recipe")
    service: ClassVar[str] = "recipe"

    model: Path
    """Folder with the model's tokenizer.json, config.json and chat template; weights are not read. Required.

    Callers ask for it by "name" of its fathom.json, else by the folder's own name.
    """

    entrypoint_address: str = Field(pattern=r"^\S+:\d{1,5}$")
    """host:port of the entrypoint. Required."""

    public_listen: str = Field(default="127.0.0.1:8000", pattern=r"^\S+:\d{1,5}$")
    """host:port of the HTTP API. Anything but loopback needs keys_file."""

    keys_file: str = ""
    """File with the API keys (docs/operations.md), read again when it changes. Empty: everybody may do everything."""

    state_url: SecretStr = SecretStr("")
    """Where responses and conversations are kept: sqlite:///PATH for one recipe, postgresql://USER:PASSWORD@HOST/NAME
    for several that share them. Empty: nowhere, and what needs them is refused."""

    image_urls: str = ""
    """Hosts that images may be fetched from by https, separated by commas: images.example.com, *.example.com, or * for
    any; with :port where it is not 443. Never from other than public addresses. Empty: URLs are refused."""

    max_body_bytes: ClassVar[int] = 8 << 20
    """Longest request body, in bytes; a million token ids as JSON are about seven million."""

    @field_validator("state_url")
    @classmethod
    def _is_a_state_url(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            # Late: the database library is 14 MB of memory, and a recipe without state does without.
            from services.recipe.response_store_link import read_state_url

            read_state_url(value.get_secret_value())
        return value

    @field_validator("image_urls")
    @classmethod
    def _are_hosts(cls, value: str) -> str:
        read_rules(value)
        return value

    @field_validator("keys_file")
    @classmethod
    def _is_there_for_strangers(cls, value: str, info: ValidationInfo) -> str:
        listen = info.data.get("public_listen", "")  # absent when it is wrong itself
        if listen and not value and not _is_loopback(listen):
            raise ValueError(f"is required when public_listen is not loopback, and it is {listen}")
        return value


def _is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
