"""How do messages and prompts become token ids, without a user's text ever becoming a control token?"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.recipe.disguise import Disguise
from services.recipe.refusals import refuse
from services.recipe.template import ChatTemplate
from services.recipe.tokenizer import PromptTokenizer

THREAD_CHARACTERS = 4096
"""Texts from this length on are encoded off the event loop: 4 KB there cost every stream milliseconds."""


class Encoder:
    """Chat and plain prompts to ids, for one model."""

    def __init__(self, tokenizer: PromptTokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._disguise = Disguise(tokenizer.spellings, template.literals if template else ())
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="encode")

    async def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins."""
        size = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
        return await self._run(size, lambda: self.chat_ids(messages))

    async def text(self, prompt: str) -> list[int]:
        """Return the ids of a bare prompt; control spellings in it are plain text."""
        return await self._run(len(prompt), lambda: self._tokenizer.plain_ids(prompt, is_whole_prompt=True))

    def chat_ids(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the ids of a conversation; blocks for as long as that takes."""
        if self._template is None:
            raise refuse("", "this model has no chat template; use /v1/completions", code="chat_template_missing")
        disguised = self._disguise.cover(messages)
        return self._tokenizer.marked_ids(self._template.render(disguised.messages), disguised.originals)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, num_characters: int, work: Callable[[], list[int]]) -> list[int]:
        if num_characters < THREAD_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
