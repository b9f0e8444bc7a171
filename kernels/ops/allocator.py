"""How are a step's large temporary results kept from costing page faults?"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Tell glibc to keep up to 1 GiB of freed memory instead of returning it page by page; elsewhere do nothing.

    Matrix kernels allocate their results, a few MB each, and glibc unmaps such blocks at once: every step would fault
    the same pages in again (measured: 4 to 8 % of a prefill step).
    """
    with suppress(OSError, AttributeError):  # no glibc here
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
