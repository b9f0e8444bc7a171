"""What can an entrypoint be told?"""

from typing import ClassVar

from pydantic import Field, SecretStr, field_validator

from services.chassis.config import ServiceSettings, settings_config
from services.chassis.kvstore_shards import parse_replicas

CLUSTER_KEY_BYTES = 32


class EntrypointSettings(ServiceSettings):
    """Settings of one entrypoint process."""

    service: ClassVar[str] = "entrypoint"
    model_config = settings_config("entrypoint")

    prefill_lb_address: str
    """host:port of the prefill balancer."""

    decode_lb_address: str
    """host:port of the decode balancer."""

    kvstore_address: str = ""
    """host:port of the KV store, or of each replica with its lasting name: a=host:port,b=host:port, the same text
    everywhere. Empty, or away: every prompt counts as not stored."""

    vision_address: str = ""
    """host:port of the image encoder. Empty: images are refused for now, even for a model that takes them."""

    cluster_key: SecretStr
    """32 bytes in hex, the same on every entrypoint: who has it can name stored blocks. It never leaves here."""

    max_requests: int = Field(default=256, ge=1)
    """Requests in flight here. More are refused at once: they would only wait, and the caller can go elsewhere."""

    @field_validator("kvstore_address")
    @classmethod
    def _names_replicas(cls, value: str) -> str:
        parse_replicas(value)
        return value

    @field_validator("cluster_key")
    @classmethod
    def _is_a_key(cls, value: SecretStr) -> SecretStr:
        try:
            key = bytes.fromhex(value.get_secret_value())
        except ValueError:
            raise ValueError("must be hex digits") from None
        if len(key) != CLUSTER_KEY_BYTES:
            raise ValueError(f"must be {CLUSTER_KEY_BYTES} bytes in hex, not {len(key)}")
        return value

    @property
    def cluster_key_bytes(self) -> bytes:
        """The key itself. 32 bytes."""
        return bytes.fromhex(self.cluster_key.get_secret_value())
