"""Which window slot belongs to which sequence, and what is a window state?

A model with sliding windows keeps, per sequence, the newest keys of every layer beside the blocks. That state belongs
to one exact position: it cannot be shared, cut or extended, only saved, restored and continued. Slots only; no bytes.
"""

from dataclasses import dataclass

NULL_WINDOW = 0
"""Padding, and the slot of every sequence of a model without windows; never given out otherwise."""


class OutOfWindows(Exception):  # noqa: N818 - named by meaning, like the service errors
    """Every window slot is held; nothing was given out."""


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """The windows of one model."""

    window_tokens: int
    """Newest tokens that a query sees, itself included."""
    backtrack_tokens: int
    """Newest tokens that may be taken back (rejected drafts) without losing a key some query still needs."""
    num_layers: int
    """Layers with a window. Each looks through the one below, so exactness reaches back this many windows."""
    num_encoder_layers: int
    """Those below the last KV source: their part of a state is what bounded replay starts from."""
    state_bytes: int
    """Of one whole state."""
    encoder_bytes: int
    """Of the encoder layers' part: a state's first bytes."""

    @property
    def exact_tokens(self) -> int:
        """Tokens that must be computed before a position for every layer's window there to be exact."""
        return self.num_layers * (self.window_tokens - 1)


class WindowPool:
    """Slots 1 .. num_slots-1 of one device; one engine thread owns it.

    Without slots (a model without windows) every sequence shares the null window, and there is always one.
    """

    def __init__(self, num_slots: int) -> None:
        """num_slots counts the null window, as the device array does; 0 for a model without windows."""
        if num_slots == 1 or num_slots < 0:
            raise ValueError(f"a pool of {num_slots} windows has none to give out")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, NULL_WINDOW, -1))
        self._held: set[int] = set()

    @property
    def has_free(self) -> bool:
        return bool(self._free) or not self.num_slots

    @property
    def used_windows(self) -> int:
        return len(self._held)

    def allocate(self) -> int:
        """Hold a slot, whatever it contains; OutOfWindows when there is none."""
        if not self.num_slots:
            return NULL_WINDOW
        if not self._free:
            raise OutOfWindows(f"all {self.num_slots - 1} windows are held")
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Let go of a slot. The null window needs no release; ValueError for a slot that is not held."""
        if slot == NULL_WINDOW:
            return
        if slot not in self._held:
            raise ValueError(f"window {slot} is not held")
        self._held.remove(slot)
        self._free.append(slot)
