"""Where does a stop string end the answer, and how much text may be shown before that is known?"""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete in it.

    The stop string that is complete first wins; of two that end together, the longer. That makes the cut independent
    of how the text is dealt out over calls, and equal for streams and whole answers. Text that may be the beginning of
    a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_cut = False
        self.found = ""
        """The stop string that cut the text."""

    def feed(self, text: str) -> str:
        """Return the text that may be shown now. After a cut (`is_cut`) nothing more is."""
        if self.is_cut:
            return ""
        buffer = self._held + text
        # A match cannot end inside the held text: it would have been found when that came.
        cuts = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if cuts:
            self.is_cut = True
            self._held = ""
            end, at = min(cuts)
            self.found = buffer[at:end]
            return buffer[:at]
        keep = self._first_possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def rest(self) -> str:
        """Return what was held back; the answer ended without a stop string."""
        held, self._held = self._held, ""
        return "" if self.is_cut else held

    def _first_possible_start(self, buffer: str) -> int:
        """Return the first index from which the buffer's end could grow into a stop string."""
        first = len(buffer)
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= at < first:
                if stop.startswith(buffer[at:]):
                    first = at
                    break
                at = buffer.find(stop[0], at + 1)
        return first
