"""Stands in for the device that a handoff copies blocks from."""

import threading


class Device:
    """Blocks that are copied at once, by whoever asks or in a thread of their own; `error` is the answer instead."""

    def __init__(self, block_bytes, window_bytes, *, copies_beside=False):
        """copies_beside: whoever asks copies."""
        self.copies_beside = copies_beside
        self.error: Exception | None = None
        self.is_stuck = False
        self.num_copied = 0
        self._block_bytes, self._window_bytes = block_bytes, window_bytes

    def post_copy(self, blocks, places, then):
        self.num_copied += 1
        for block, place in zip(blocks, places, strict=True):
            place[:] = bytes([block + 1]) * self._block_bytes
        self._answer(then)

    def post_copy_window(self, place, then):
        place[:] = b"w" * self._window_bytes
        self._answer(then)

    def _answer(self, then):
        if self.copies_beside:
            then(self.error)
        elif not self.is_stuck:
            threading.Thread(target=then, args=(self.error,)).start()
