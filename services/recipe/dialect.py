"""How is one model family spoken to? The seam between its text format and the public APIs.

A renderer turns a conversation into prompt ids, a parser turns sampled ids into what the model said. Whoever answers in
another API's words (Responses, Messages) needs nothing but these events, by way of `transcript.Piece`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.recipe.conversation import Conversation
from services.recipe.detokenize import Detokenizer
from services.recipe.framing import PLAIN, Framing

IMAGE_PLACE = -1
"""Stands in rendered ids where a picture belongs; `pictures.place` puts the picture's own ids there."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool; its arguments follow. index: counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`; all of them together are a JSON object, unless the answer was cut off."""

    index: int
    text: str


Event = Reasoning | Text | CallBegun | CallArguments
"""In one answer reasoning comes first, then text, then calls."""


class Parser(Protocol):
    """Reads one answer. Its events, with neighbours of a kind joined, do not depend on how tokens are dealt out."""

    num_reasoning_tokens: int
    """Tokens that were spent on thinking so far."""

    is_text: bool
    """Whether the token fed last belongs to the answer's text: those have logprobs to show."""

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """Return what these tokens say; text that may still turn out to be markup is held back."""

    def rest(self, *, is_whole: bool) -> list[Event]:
        """Return what was held back; the answer has ended, by itself (is_whole) or by its token limit."""


class Renderer(Protocol):
    """Writes prompts."""

    def render(self, conversation: Conversation, *, context_tokens: int | None = None) -> list[int]:
        """Return the ids up to where the answer begins, with IMAGE_PLACE for every picture.

        Nothing that a caller wrote becomes a control token. Raises a 400 for what the model's format cannot say, and
        for what cannot fit context_tokens, the latter before it is encoded. Blocks for as long as encoding takes.
        """


@dataclass(frozen=True, slots=True)
class Dialect:
    """A family's two directions, and what its format has words for.

    renderer None: no chat, and `no_chat` says why.
    """

    renderer: Renderer | None
    parser: Callable[[Conversation], Parser]
    takes_tools: bool = False
    takes_images: bool = False
    default_effort: str = "none"
    """How hard the model thinks when nobody says; "none" for families that do not reason."""
    no_chat: str = ""
    framing: Framing = PLAIN

    @property
    def reasons(self) -> bool:
        """Whether the family can think before it answers."""
        return self.default_effort != "none"


class PlainParser:
    """The parser of models whose answers are text and nothing else. pieces: bytes of each id."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._detokenizer = Detokenizer(pieces)
        self.num_reasoning_tokens = 0
        self.is_text = True

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        text = self._detokenizer.feed(token_ids)
        return [Text(text)] if text else []

    def rest(self, *, is_whole: bool) -> list[Event]:  # noqa: ARG002 - nothing is ever held back
        return []
