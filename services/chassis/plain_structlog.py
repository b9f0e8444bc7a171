"""How is structlog loaded without rich, which it would take along for coloured tracebacks wherever that is installed?

Logs here are JSON: rich and what it imports would be 4 MiB, and a twentieth of a second at the start, for nothing.
Rich is hidden from the thread that loads structlog alone: another one may import it meanwhile.
"""

import sys
import threading

__all__ = ["structlog"]


class _WithoutRich:
    """Finds nothing, and for rich, in the thread that made it, says so at once."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Raise ModuleNotFoundError where Python is not to look any further."""
        if name == "rich" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("structlog is loaded without rich", name=name)


_without_rich = _WithoutRich()
# Other lists, not another entry and one less in this one: a thread that goes through it now would miss a finder.
sys.meta_path = [_without_rich, *sys.meta_path]
try:
    import structlog
finally:
    sys.meta_path = [finder for finder in sys.meta_path if finder is not _without_rich]
