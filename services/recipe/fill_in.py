"""Which ids ask a model to write what stands between two texts?

Models that learned it have three control tokens for it, in one of a few spellings: one before the text that precedes,
one before the text that follows, and one after which the model fills in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.recipe.tokenizer import PromptTokenizer

_SPELLINGS: Final = (
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek's own bars
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen's
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder's
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder's
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """One vocabulary's three tokens."""

    before: int
    after: int
    here: int

    @classmethod
    def of(cls, tokenizer: PromptTokenizer) -> FillIn | None:
        """Return the tokens of this vocabulary; None when it has none of the known spellings."""
        for spelled in _SPELLINGS:
            before, after, here = (tokenizer.control_id(spelling) for spelling in spelled)
            if before is not None and after is not None and here is not None:
                return cls(before, after, here)
        return None

    def ids(self, opening: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt. opening: what the model expects before any text."""
        return [*opening, self.before, *prefix, self.after, *suffix, self.here]
