"""Where do a model's tensors come from? A Hugging Face safetensors folder, or a GGUF file.

No torch before a tensor is read: a service finds out that there are no weights before anything heavy is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from kernels.models.digest import Progress, files_digest

if TYPE_CHECKING:
    from torch import Tensor


class BadWeights(Exception):  # noqa: N818 - named by meaning, like the service errors
    """The weights at `path` cannot be used; `problems` lists every reason found, not just the first."""

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__(f"cannot use the weights at {path}: " + "; ".join(self.problems))


class Weights(Protocol):
    """A model's tensors under their Hugging Face names, in the dtype they are stored in (GGUF quants: fp32)."""

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor; KeyError when there is none of that name."""

    def tensor(self, name: str) -> Tensor:
        """Memory-mapped where the file allows it: do not write to it. KeyError when there is none of that name."""

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of the stored weights: part of the model's fingerprint."""


class SafetensorsWeights:
    """One or more memory-mapped safetensors files."""

    def __init__(self, path: Path, files: Sequence[Path], progress: Progress | None = None) -> None:
        self.path = path
        self._files = tuple(files)
        self._progress = progress
        self._open = {file: _open(file) for file in files}
        self._file_of = {name: file for file, handle in self._open.items() for name in handle.keys()}  # noqa: SIM118 - not a dict

    @property
    def files(self) -> tuple[Path, ...]:
        """In the order they were named."""
        return self._files

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._file_of))

    def file(self, name: str) -> Path:
        """The one that holds this tensor; KeyError when none does."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self._file_of[name]].get_tensor(name)
        return tensor

    def digest(self) -> bytes:
        return files_digest(self._files, self._progress)


def open_weights(model_dir: Path, progress: Progress | None = None) -> Weights:
    """Open a folder with safetensors, a folder with one .gguf, or a .gguf file. BadWeights when it is none of these.

    Reads headers only; `digest()` reads everything once and reports to `progress`.
    """
    gguf = gguf_file(model_dir)
    if gguf is not None:
        return _open_gguf(gguf, progress)
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        return _open_sharded(model_dir, index, progress)
    return SafetensorsWeights(model_dir, [model_dir / "model.safetensors"], progress)


def gguf_file(model_dir: Path) -> Path | None:
    """The GGUF file that holds the weights; None if they are safetensors. BadWeights when it is neither."""
    if model_dir.suffix == ".gguf" and model_dir.is_file():
        return model_dir
    if not model_dir.is_dir():
        raise BadWeights(model_dir, ["there is no such folder"])
    if any((model_dir / name).is_file() for name in ("model.safetensors.index.json", "model.safetensors")):
        return None
    files = sorted(model_dir.glob("*.gguf"))
    if not files:
        raise BadWeights(model_dir, ["it holds no model.safetensors, model.safetensors.index.json or .gguf file"])
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise BadWeights(model_dir, [f"it holds {len(files)} GGUF files ({names}): pass one of them"])
    return files[0]


def require(weights: Weights, expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise BadWeights listing every tensor of `expected` (name -> shape) that is missing or has another shape."""
    present = set(weights.names())
    problems = [f"tensor {name} is missing" for name in expected if name not in present]
    for name, shape in expected.items():
        if name in present and weights.shape(name) != shape:
            problems.append(f"tensor {name} has shape {list(weights.shape(name))}, the config asks for {list(shape)}")
    if problems:
        raise BadWeights(path, problems)


def _open_sharded(model_dir: Path, index: Path, progress: Progress | None) -> SafetensorsWeights:
    try:
        file_of: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        outside = sorted(name for name in set(file_of.values()) if Path(name).name != name)
    except (ValueError, KeyError, TypeError) as error:
        raise BadWeights(model_dir, [f"{index.name} has no readable weight_map: {error!r}"]) from error
    missing = sorted(name for name in set(file_of.values()) if not (model_dir / name).is_file())
    if outside or missing:
        problems = [f"shard {name} lies outside the folder" for name in outside]
        raise BadWeights(model_dir, problems + [f"shard {name} is missing" for name in missing])
    weights = SafetensorsWeights(model_dir, [model_dir / name for name in sorted(set(file_of.values()))], progress)
    present = set(weights.names())
    misplaced = sorted(
        name for name, shard in file_of.items() if name not in present or weights.file(name).name != shard
    )
    if misplaced:
        raise BadWeights(model_dir, [f"tensor {name} is not in its shard {file_of[name]}" for name in misplaced])
    return weights


def _open_gguf(file: Path, progress: Progress | None) -> Weights:
    from kernels.models.weights_gguf import GgufWeights  # that module imports this one's words

    return GgufWeights(file, progress)


def _open(file: Path) -> Any:  # safetensors' methods have no types

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BadWeights(file, [f"not a complete safetensors file: {error}"]) from error
