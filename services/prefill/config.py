"""What can a prefill replica be told?"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from services.chassis.config import ServiceSettings, settings_config


class PrefillSettings(ServiceSettings):
    """Settings of one prefill replica, FATHOM_PREFILL_*."""

    service: ClassVar[str] = "prefill"
    model_config = settings_config("prefill")

    model: Path
    """Folder with the weights. Required: there is no sensible default."""

    dtype: Literal["bf16", "fp32", "int8"] = "bf16"
    """Of weights and KV (int8: weights only). Must be the decode replicas', or they refuse each other's blocks."""

    kv_bytes: int = Field(default=0, ge=0)
    """Size of the block pool, in bytes; 0 takes what a GPU has left beside weights, graphs and windows, 1 GiB on a CPU.
    A prompt needs all its blocks at once, until decode has them."""

    threads: int = Field(default=2, ge=1)
    """Torch's threads. More than there are free cores makes them wait for each other."""

    chunk_tokens: int = Field(default=512, ge=1)
    """Tokens per step. More fills the device better; less lets a new prompt in sooner."""

    kvstore_address: str = ""
    """host:port of the KV store; empty runs without one."""
