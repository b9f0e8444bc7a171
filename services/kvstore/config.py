"""What can the KV store be told?"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.chassis.config import ServiceSettings, settings_config


class KvstoreSettings(ServiceSettings):
    """Settings of the KV store, FATHOM_KVSTORE_*."""

    service: ClassVar[str] = "kvstore"
    model_config = settings_config("kvstore")

    path: Path = Path(".fathom/kv")
    """Folder of the segment files, created if need be. One store at a time; *.seg, lock, keys and reads.sock in it are
    ours."""

    max_bytes: int = Field(default=20 << 30, ge=1 << 20)
    """Cap on the disk that the segment files take together; above 90 % of it the coldest go. Less than
    five times a block's bytes keeps none for long; one longer than half of it is refused."""

    segment_bytes: int = Field(default=256 << 20, ge=64 << 10)
    """When a segment file is full; also what one eviction frees. A sixteenth of `max_bytes` if that is less."""

    agent_seconds: float = Field(default=3 * 86_400.0, gt=0)
    """How long blocks of agent loops live after they were written or refreshed."""

    chat_seconds: float = Field(default=7 * 86_400.0, gt=0)
    """The same for chat turns. Blocks of no class live until their room is needed."""

    quota_bytes: dict[str, int] = Field(default_factory=dict)
    """Most payload that a tenant may hold, by its name, "*" for all others: {"*": 10737418240}. A tenant over its quota
    loses its own coldest blocks, and nobody else's. Empty: no quotas."""

    encryption_key_file: str = ""
    """File with the master key (32 bytes, or 64 hex digits) that wraps a key of each tenant. Empty: not encrypted."""

    object_store_url: str = Field(default="", pattern=r"^$|^s3://[^/\s]+(/\S*)?$|^file:///\S+$")
    """Where sealed segments go too, for all replicas to find: s3://BUCKET/PREFIX or file:///FOLDER. Empty: nowhere."""

    object_store_options_file: str = ""
    """JSON file with endpoint, credentials and patience for it (docs/adr/0014-kv-objects.md). Empty: the defaults."""
