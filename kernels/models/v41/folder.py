"""What does a V4.1 folder hold, whichever device its model is for?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kernels.kv.window import WindowSpec
from kernels.models.model import Progress
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import V41Config
from kernels.models.v41.engram import read_compressed_ids
from kernels.models.v41.layout import v41_layout, window_spec
from kernels.ops.numerics import Numerics


class V41Folder:
    """Its config was read, its tensors are checked."""

    def __init__(
        self, model_dir: Path, config: V41Config, *, numerics: Numerics, block_tokens: int | None, progress: Progress
    ) -> None:
        """block_tokens: None takes the model's own.  Raises BadWeights, or ValueError for a setting that cannot be."""
        if block_tokens not in {None, config.block_tokens}:
            raise ValueError(f"block_tokens {block_tokens}: this model's blocks have {config.block_tokens} tokens")
        self._config = config
        self._compressed_ids = read_compressed_ids(model_dir, config.engram)
        self.layout = v41_layout(config, numerics)
        self.window: WindowSpec | None = window_spec(config, self.layout)
        self._checkpoint = Checkpoint(model_dir, config, progress)

    def weights_digest(self) -> bytes:
        """The tokenizer counts as a weight: n-gram rows are found by how its tokens read.

        The same for every device: the recipe tells them apart.
        """
        ids = hashlib.sha256(self._compressed_ids.numpy().tobytes()).digest()
        return hashlib.sha256(b"fathom.v41.weights.1" + self._checkpoint.digest() + ids).digest()
