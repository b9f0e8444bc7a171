"""Which images' embeddings are kept here, and which go when there are too many?"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One encoded image."""

    content_hash: bytes
    num_tokens: int
    data: bytes
    """[num_tokens, hidden] row-major fp32."""


class EmbeddingCache:
    """Embeddings by content hash, at most `max_bytes` of them; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Embeddings] = OrderedDict()
        self.num_bytes = 0
        """Of all that are kept."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, content_hash: bytes) -> Embeddings | None:
        """Return an image's embeddings, if they are here, and keep them longer."""
        found = self._kept.get(content_hash)
        if found is not None:
            self._kept.move_to_end(content_hash)
        return found

    def put(self, embeddings: Embeddings) -> None:
        """Keep embeddings; one image larger than the whole cache is not kept."""
        self._drop(embeddings.content_hash)
        if len(embeddings.data) > self._max_bytes:
            return
        self._kept[embeddings.content_hash] = embeddings
        self.num_bytes += len(embeddings.data)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, content_hash: bytes) -> None:
        gone = self._kept.pop(content_hash, None)
        if gone is not None:
            self.num_bytes -= len(gone.data)
