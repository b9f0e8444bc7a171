"""Which vision tower is in this folder, and what are an image's embeddings? The architecture decides, here alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from kernels.models.config import ModelNotSupported
from kernels.models.model import Dtype, Progress
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import V41Config, is_v41, read_v41_config
from kernels.models.v41.config_fields import read_json
from kernels.models.v41.vision_tower import Fetch, VisionTower
from kernels.ops.allocator import keep_freed_memory
from kernels.ops.linear import choose
from kernels.ops.numerics import KVQ, QUANT

_PROBE_PATCHES = 7, 5
"""Of the picture whose bits name this machine's arithmetic: merged squares at both edges are incomplete."""


class ImageEncoder:
    """A loaded tower. One thread at a time."""

    def __init__(
        self, tower: VisionTower, hidden_size: int, *, weights_digest: bytes, recipe: str, threads: int
    ) -> None:
        self._tower = tower
        self._threads = threads
        self.config = tower.config
        self.hidden_size = hidden_size
        """Of the language model: the width of an embedding."""
        self.recipe = f"{recipe} bits={self._probe().hex()}"
        """Everything that decides a bit of an embedding, besides the weights."""
        self.fingerprint = hashlib.sha256(b"fathom.vision.1" + weights_digest + self.recipe.encode()).digest()
        """32 bytes: images encoded under the same fingerprint have the same bits."""

    @torch.inference_mode()
    def encode(self, pixels: bytes | bytearray | memoryview, *, width: int, height: int) -> bytes:
        """Embeddings of every place the image fills, marks included: [num_tokens, hidden] row-major fp32.

        pixels: height rows of width RGB pixels, padded to whole patches.  ValueError for another number of bytes.
        """
        if len(pixels) != width * height * 3:
            raise ValueError(f"{len(pixels)} bytes are no {width} x {height} RGB picture")
        if torch.get_num_threads() != self._threads:  # OpenMP's count belongs to the calling thread
            torch.set_num_threads(self._threads)
        picture = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3)
        return self._tower.span(picture).cpu().numpy().tobytes()

    def _probe(self) -> bytes:
        size = self._tower.config.patch_size
        width, height = (patches * size for patches in _PROBE_PATCHES)
        picture = bytes((index * 73 + index // 89 * 31) % 256 for index in range(width * height * 3))
        return hashlib.sha256(self.encode(picture, width=width, height=height)).digest()


def load_encoder(
    model_dir: Path, *, dtype: Dtype, threads: int, progress: Progress | None = None
) -> ImageEncoder | None:
    """Read and pack the vision part of a folder; None for a model that takes no images.

    Raises ModelNotSupported or BadWeights.
    """
    config = _vision_model(model_dir)
    if config is None or config.vision is None:
        return None
    if dtype == "int8":
        raise ModelNotSupported("dtype int8 is not for this model: its weights are fp8 and fp4 already; use bf16")
    torch.set_num_threads(threads)
    keep_freed_memory()
    device = torch.device("cpu")
    checkpoint = Checkpoint(model_dir, config, progress, part="vision")
    kernel, numerics = choose(dtype, device), QUANT if dtype == "bf16" else KVQ
    hashed = _HashedWeights(checkpoint.dense)
    tower = VisionTower(config.vision, hashed.fetch, kernel, numerics, device)
    recipe = f"v41-vision dtype={dtype} kernel={kernel.name} threads={threads} torch={torch.__version__}"
    return ImageEncoder(tower, config.hidden_size, weights_digest=hashed.digest(), recipe=recipe, threads=threads)


def _vision_model(model_dir: Path) -> V41Config | None:
    """The config of a folder whose architecture can see; None for all others, which have their own readers."""
    described = model_dir / "config.json"
    if not described.is_file() or not is_v41(read_json(described)):
        return None
    return read_v41_config(model_dir)


class _HashedWeights:
    """Reads tensors and names them: the language model's bytes, hundreds of times as many, need not be hashed here."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._seen: dict[str, bytes] = {}

    def fetch(self, name: str) -> Tensor:
        tensor = self._fetch(name).contiguous()
        seen = hashlib.sha256(repr(tuple(tensor.shape)).encode())
        seen.update(tensor.numpy().data)
        self._seen[name] = seen.digest()
        return tensor

    def digest(self) -> bytes:
        """SHA-256 over all that was fetched, whatever the order."""
        whole = hashlib.sha256(b"fathom.vision.weights.1")
        for name in sorted(self._seen):
            whole.update(name.encode() + b"\0" + self._seen[name])
        return whole.digest()
