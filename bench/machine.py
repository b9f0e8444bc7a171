"""Which machine gave these figures?"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")


def describe() -> str:
    """Name processor, usable cores and the vector extensions that matter here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in _FLAGS if flag in fields.get("flags", "").split()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{fields.get('model name', platform.machine())}, {cores} cores, {' '.join(flags) or 'no vector flags known'}"
    )
