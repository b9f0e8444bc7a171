"""What is a model to the executor? Weights and caches of one model on one device, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from kernels.batch import Batch, Sampled
from kernels.kv.block_bytes import Fetched
from kernels.kv.layout import KvLayout
from kernels.kv.window import WindowSpec

Dtype = Literal["bf16", "fp32", "int8"]
Progress = Callable[[str, int, int], None]
"""(stage, done, total)."""


class BadBatch(ValueError):  # noqa: N818 - named by meaning, like the service errors
    """A row cannot be computed as it stands: the caller's scheduling is wrong."""


class ModelInfo(Protocol):
    """What callers may know of a model's config."""

    @property
    def vocab_size(self) -> int:
        """Logit width; token ids are below it, except those that name the places of images."""

    @property
    def max_position_tokens(self) -> int:
        """Longest sequence."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer by the model's own rules."""

    @property
    def hidden_size(self) -> int:
        """Width of an embedding."""

    @property
    def image_token_ids(self) -> tuple[int, ...]:
        """Ids that name the places of images in prompts; empty for a model that takes none."""


class Model(Protocol):
    """A loaded model with its caches. One thread at a time."""

    @property
    def info(self) -> ModelInfo:
        """The config's part that callers need."""

    @property
    def layout(self) -> KvLayout:
        """Of its blocks and windows."""

    @property
    def window(self) -> WindowSpec | None:
        """Of its sliding windows; None when it has none."""

    @property
    def preceding_tokens(self) -> int:
        """How many tokens before a row its forward looks at, besides what is cached."""

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Row counts proven bit-equal on this machine."""

    def numeric_recipe(self) -> str:
        """Everything that decides a bit: arithmetic, library, and a hash of what they compute here."""

    def forward(self, batch: Batch, *, every_row: bool) -> Tensor:
        """Logits of the last token of each row that wants one (or of every row), [wanted, vocab_size] fp32.

        KV of all tokens goes to blocks and windows.  Raises BadBatch before anything is changed.
        """

    @property
    def is_on_host(self) -> bool:
        """Whether blocks and windows lie in memory that any thread can read, also while `forward` runs."""

    def read_block(self, block_id: int) -> bytes:
        """layout.block_bytes bytes."""

    def fetch_block(self, block_id: int) -> Fetched:
        """Begin to read a block; nothing is waited for."""

    def copy_block(self, block_id: int, place: memoryview) -> None:
        """The same bytes, into host memory of that size. ValueError for another size, or for the null block."""

    def write_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        """ValueError for another size than layout.block_bytes, or for the null block."""

    def take_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> int:
        """As `write_block`, from memory that others may write meanwhile: the XXH3 of what the block holds now."""

    def read_window(self, slot: int, *, encoder_only: bool) -> bytes:
        """A state as layout.window_streams describes it, or its encoder part."""

    def write_window(self, slot: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a state: a whole one, or the encoder part with everything else empty. ValueError for other sizes."""

    def reset_window(self, slot: int) -> None:
        """Make a state empty: what a sequence starts with."""


class Draws(Protocol):
    """Tokens on their way from the device."""

    def wait(self) -> tuple[Sampled, ...]:
        """One per row that wants a token, in row order. Waits for this step and no later one."""


@runtime_checkable
class DrawsTokens(Protocol):
    """A model whose device also samples, so that a step can be launched before the last one's tokens are known."""

    def draw(self, batch: Batch, logits: Tensor) -> Draws:
        """Sample for the rows that want a token, from what `forward` returned; nothing is waited for.

        A sequence's row of the next batch may then hold PENDING for the token drawn here.
        """


class OpenedModel(Protocol):
    """A model folder whose config was read: its bytes are known, its weights not yet in memory."""

    @property
    def layout(self) -> KvLayout:
        """Of one block and one window."""

    @property
    def window(self) -> WindowSpec | None:
        """Of the model's sliding windows, if it has some."""

    def weights_digest(self) -> bytes:
        """32 bytes that name the weights."""

    def fitting_blocks(self, *, num_windows: int) -> int:
        """How many blocks the device has room for beside weights and windows; 0 where that is not known.

        num_windows: null window counted.  Raises NoRoom.
        """

    def build(self, *, num_blocks: int, num_windows: int) -> Model:
        """Read, check and pack the weights, and make the caches (null block and null window counted)."""
