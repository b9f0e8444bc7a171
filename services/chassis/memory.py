"""How does a process take and give back memory for large messages without a page fault for each of their pages?"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
MESSAGE_BYTES = 8 << 20
"""Larger than any message; what is larger still goes back to the system as soon as it is freed."""
KEPT_BYTES = 32 << 20
"""Freed memory that may be kept at the end of a heap."""


def keep_freed_memory() -> bool:
    """Have the memory of a freed message used for the next one; False where the C library has no such setting.

    Without it glibc gives the memory of a message of a MiB or two back to the system each time, to take it anew for the
    next one: a stream of such messages by gRPC is then less than half as fast. To be called once, early.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, or not Linux
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MESSAGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
