"""How does DeepSeek's own library write prompts and read answers? The same two directions as ours, by deepseek-recipe.

An alternative for those who want exactly its behaviour ("renderer": "deepseek-recipe" in the folder's fathom.json, and
the extra `deepseek`), and the other side of our differential tests. It renders; the encoding stays ours, because the
library would take an image token that a user spelled for the place of the next picture. Its parser shows arguments as
the model wrote them, which may be no JSON, and shows control tokens as text: reasons why it is not the default.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import deepseek_recipe as library

from services.recipe.conversation import Conversation, Tool, Turn
from services.recipe.deepseek_renderer import PICTURE, Part, Token, content, encode_parts
from services.recipe.deepseek_words import Vocabulary
from services.recipe.dialect import CallArguments, CallBegun, Event, Reasoning, Text
from services.recipe.disguise import free_characters
from services.recipe.refusals import refuse

_EFFORTS: dict[str, Literal["low", "high", "xhigh", "max"]] = {
    "minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "xhigh", "max": "max",
}  # fmt: skip


class LibraryRenderer:
    """Writes V4.1 prompts as the library does."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._encoding = library.DeepseekV41Encoding()

    def render(self, conversation: Conversation, *, context_tokens: int | None = None) -> list[int]:
        return encode_parts(self._parts(conversation), self._vocabulary, context_tokens)

    def _parts(self, conversation: Conversation) -> Iterator[Part]:
        texts = [part for turn in conversation.turns for part in turn.parts if isinstance(part, str)]
        picture = next(free_characters(texts), None)
        if picture is None:
            raise refuse("messages", "all private-use characters of Unicode are taken; none is left to mark pictures")
        rendered = self._encoding.render_conversation(to_library(conversation, picture))
        at = 0
        for start, end in rendered.special_ranges:
            yield rendered.prompt[at:start]
            spelling = rendered.prompt[start:end]
            yield PICTURE if spelling == picture else Token(spelling)
            at = end
        yield rendered.prompt[at:]


class LibraryParser:
    """Reads one answer as the library does. tokenizer: the folder's, once more: the library decodes for itself."""

    is_text = False
    """The library does not say which tokens became text, so no logprobs are shown."""

    def __init__(self, tokenizer: library.Tokenizer, conversation: Conversation) -> None:
        thinks = conversation.effort != "none"
        request = library.ConversationRequest(to_library(conversation), library.ModelVersion.DeepseekV41Flash)
        stage = library.ThinkingInitialStage.ReasoningStart if thinks else None
        options = library.ParsingOptions(parse_tool_calls=bool(conversation.tools), thinking_initial_stage=stage)
        generator = library.ChatCompletionRequest.chunk_generator(request, "id", "model")
        self._processor = library.StreamProcessor(generator, options, tokenizer)
        self._processor.push(library.InferenceChunk.ready())
        self.num_reasoning_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        if self._processor.finished or not token_ids:
            return []
        return self._events(self._processor.push(library.InferenceChunk.tokens(list(token_ids))))

    def rest(self, *, is_whole: bool) -> list[Event]:
        reasons = library.InferenceFinishReason
        reason = reasons.Stop if is_whole else reasons.Length
        if self._processor.finished:
            return []
        pushed = self._processor.push(library.InferenceChunk.finish(reason))
        return self._events([*pushed, *self._processor.finish()])

    def _events(self, chunks: Iterable[Any]) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            read = json.loads(chunk.to_json())
            details = (read.get("usage") or {}).get("completion_tokens_details") or {}
            self.num_reasoning_tokens = details.get("reasoning_tokens", self.num_reasoning_tokens)
            for choice in read["choices"]:
                events += _read_delta(choice["delta"])
        return events


def load_tokenizer(folder: Path) -> library.Tokenizer:
    """Return the folder's tokenizer in the library's form."""
    return library.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _read_delta(delta: dict[str, Any]) -> Iterator[Event]:
    if text := delta.get("reasoning_content"):
        yield Reasoning(text)
    if text := delta.get("content"):
        yield Text(text)
    for call in delta.get("tool_calls") or ():
        if name := call["function"].get("name"):
            yield CallBegun(call["index"], name)
        if text := call["function"].get("arguments"):
            yield CallArguments(call["index"], text)


def to_library(conversation: Conversation, picture: str = "\ue000") -> library.Conversation:
    """Return the library's form of a conversation. picture: stands for pictures, and occurs in no text."""
    thinks = conversation.effort != "none"
    return library.Conversation(
        [_message(turn, picture) for turn in conversation.turns],
        thinking_mode=thinks,
        tools=[_tool(tool) for tool in conversation.tools],
        reasoning_effort=_EFFORTS[conversation.effort] if thinks else None,
    )


def _tool(tool: Tool) -> library.ToolDefinition:
    return library.ToolDefinition(tool.name, tool.description, dict(tool.parameters))


def _message(turn: Turn, picture: str) -> library.Message:
    if turn.role in {"system", "developer"}:
        return library.SystemMessage(turn.text)
    if turn.role == "tool":
        return library.ToolMessage(turn.text, turn.call_id)
    if turn.role == "assistant":
        calls = [library.ToolCall(call.id, call.name, call.arguments) for call in turn.calls]
        return library.AssistantMessage(turn.text, turn.reasoning, calls or None)
    written = "".join(part if isinstance(part, str) else picture for part in content(turn))
    sources = [library.BytesImageSource(b"") for part in turn.parts if not isinstance(part, str)]
    return library.UserMessage(written, sources, image_token=picture)
