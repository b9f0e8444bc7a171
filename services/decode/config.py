"""What can a decode replica be told?"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from services.chassis.config import ServiceSettings, settings_config


class DecodeSettings(ServiceSettings):
    """Settings of one decode replica, FATHOM_DECODE_*."""

    service: ClassVar[str] = "decode"
    model_config = settings_config("decode")

    model: Path
    """Folder with the weights. Required: there is no sensible default."""

    dtype: Literal["bf16", "fp32", "int8"] = "bf16"
    """Of weights and KV (int8: weights only). Must be the prefill replicas', or they refuse each other's blocks."""

    kv_bytes: int = Field(default=0, ge=0)
    """Size of the block pool, in bytes; 0 takes what a GPU has left beside weights, graphs and windows, 1 GiB on a CPU.
    When it runs out, the youngest sequence gives its blocks up for a while."""

    threads: int = Field(default=2, ge=1)
    """Torch's threads. More than there are free cores makes them wait for each other."""

    max_batch: int = Field(default=32, ge=1)
    """Sequences per step. Beyond it, a step takes longer than it gains."""

    kvstore_address: str = ""
    """host:port of the KV store; empty runs without one."""
