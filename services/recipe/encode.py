"""How do messages and prompts become token ids, without a user's text ever becoming a control token?"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.chassis.errors import Overloaded
from services.recipe.disguise import Disguise
from services.recipe.refusals import refuse, too_long
from services.recipe.template import ChatTemplate
from services.recipe.tokenizer import LONG_CHARACTERS, PromptTokenizer

MAX_LONG = 2
"""Long texts encoded at once; more would take the cores from the streams."""
SLOT_SECONDS = 10.0
"""Longest wait for one of those places."""


class Encoder:
    """Chat and plain prompts to ids, for one model.

    Texts of LONG_CHARACTERS and more are encoded off the event loop, where 4 KB cost every stream milliseconds; a
    caller that finds no place for that within slot_seconds gets Overloaded. What cannot fit context_tokens (None: any
    length) is refused with a 400 before it is encoded.
    """

    def __init__(
        self, tokenizer: PromptTokenizer, template: ChatTemplate | None, *, slot_seconds: float = SLOT_SECONDS
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._disguise = Disguise(tokenizer.spellings, template.literals if template else ())
        self._threads = ThreadPoolExecutor(MAX_LONG, thread_name_prefix="encode")
        self._slots = asyncio.Semaphore(MAX_LONG)
        self._slot_seconds = slot_seconds

    async def chat(self, messages: Sequence[Mapping[str, object]], *, context_tokens: int | None = None) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins."""
        size = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
        return await self._run(size, lambda: self.chat_ids(messages, context_tokens=context_tokens))

    async def texts(self, prompts: Sequence[str | list[int]], *, context_tokens: int | None = None) -> list[list[int]]:
        """Return the ids of bare prompts, in which control spellings are plain text; ids stay as they are."""
        written = [prompt for prompt in prompts if isinstance(prompt, str)]
        for prompt in written:
            self._check_length("prompt", prompt, context_tokens)
        size = sum(map(len, written))  # many short ones keep the loop as busy as a long one
        return [await self._text(size, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def chat_ids(self, messages: Sequence[Mapping[str, object]], *, context_tokens: int | None = None) -> list[int]:
        """Return the ids of a conversation; blocks for as long as that takes."""
        if self._template is None:
            raise refuse("", "this model has no chat template; use /v1/completions", code="chat_template_missing")
        disguised = self._disguise.cover(messages)
        # Not the messages but what the template makes of them: it may trim them, or leave some out.
        rendered = self._template.render(disguised.messages)
        self._check_length("messages", rendered, context_tokens, disguised.originals)
        return self._tokenizer.marked_ids(rendered, disguised.originals)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, field: str, text: str, context_tokens: int | None, stand_ins: Iterable[int] = ()) -> None:
        if context_tokens is None:
            return
        fewest = self._tokenizer.floor.at_least(text, stand_ins)
        if fewest >= context_tokens:
            raise too_long(field, context_tokens, f"at least {fewest}", "at least 1")

    async def _text(self, num_characters: int, prompt: str) -> list[int]:
        return await self._run(num_characters, lambda: self._tokenizer.plain_ids(prompt, is_whole_prompt=True))

    async def _run(self, num_characters: int, work: Callable[[], list[int]]) -> list[int]:
        if num_characters < LONG_CHARACTERS:
            return work()
        try:
            async with asyncio.timeout(self._slot_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded("too many long prompts at once", retry_after=self._slot_seconds / 2) from None
        # Shielded: a thread cannot be stopped, so when its caller goes, its place must stay taken until it ends.
        return await asyncio.shield(asyncio.create_task(self._in_thread(work), name="encode"))

    async def _in_thread(self, work: Callable[[], list[int]]) -> list[int]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._slots.release()
