"""How is structlog loaded without rich, which it would take along for coloured tracebacks wherever that is installed?

Logs here are JSON: rich and what it imports would be 4 MiB, and a twentieth of a second at the start, for nothing.
"""

import sys

__all__ = ["structlog"]

_ABSENT = "rich" not in sys.modules
if _ABSENT:
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python's import says "not installed"
try:
    import structlog
finally:
    if _ABSENT:
        del sys.modules["rich"]
