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
    """Folder of the segment files, created if need be. One store at a time; only *.seg and `lock` in it are ours."""

    max_bytes: int = Field(default=20 << 30, ge=1 << 20)
    """Cap on the segment files together; the coldest go when a new block needs room. No block may exceed half of it."""

    segment_bytes: int = Field(default=256 << 20, ge=64 << 10)
    """When a segment file is full; also what one eviction frees. A quarter of `max_bytes` if that is less."""
