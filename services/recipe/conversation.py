"""What is a conversation, whichever API it came by and whichever model will read it?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How much a model is to think before it answers; "none" switches it off."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as the caller wrote it, not decoded. where: its place in the body; encoded: base64.

    url: where it is to be fetched from, "" for one that is there.  data: what was fetched.
    """

    where: str
    encoded: str
    url: str = ""
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made earlier. arguments: what should be a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. parameters: its JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def num_characters(self) -> int:
        """About how much of a prompt the declaration fills."""
        return len(self.name) + len(self.description) + len(str(self.parameters))


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. parts: texts and pictures in order.

    An assistant may have `reasoning` and `calls`; a tool's turn answers the call `call_id`.
    """

    role: Role
    parts: tuple[str | Picture, ...]
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""

    @property
    def text(self) -> str:
        """The texts, joined as they stand."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def num_characters(self) -> int:
        """Length of all that the caller wrote, pictures included."""
        written = [part if isinstance(part, str) else part.encoded or part.url for part in self.parts]
        called = [text for call in self.calls for text in (call.name, call.arguments)]
        return sum(map(len, (*written, *called, self.reasoning or "", self.name or "")))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, the tools that may be called in answer to them, and how hard to think (one of EFFORTS)."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    effort: str = "none"

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """All pictures, in prompt order: what the caller gave first stands first."""
        return tuple(part for turn in self.turns for part in turn.parts if isinstance(part, Picture))
