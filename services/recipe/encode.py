"""How do conversations and prompts become token ids without holding up the streams?"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.chassis.errors import Overloaded
from services.chassis.images import ImageRules
from services.recipe.conversation import Conversation
from services.recipe.dialect import Dialect
from services.recipe.fill_in import FillIn
from services.recipe.pictures import Prompt, place
from services.recipe.refusals import refuse
from services.recipe.token_floor import refuse_hopeless
from services.recipe.tokenizer import LONG_CHARACTERS, PromptTokenizer

MAX_LONG = 2
"""Long texts encoded at once; more would take the cores from the streams."""
SLOT_SECONDS = 10.0
"""Longest wait for one of those places."""

Result = TypeVar("Result")


class Encoder:
    """Chat and plain prompts to ids, for one model.

    Texts of LONG_CHARACTERS and more are encoded off the event loop, where 4 KB cost every stream milliseconds; a
    caller that finds no place for that within slot_seconds gets Overloaded. What cannot fit context_tokens (None: any
    length) is refused with a 400 before it is encoded. image_rules: None when the model takes no images.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        dialect: Dialect,
        *,
        vocab_tokens: int = 0,
        image_rules: ImageRules | None = None,
        slot_seconds: float = SLOT_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._fill_in = FillIn.of(tokenizer)
        self._vocab_tokens = vocab_tokens
        self._image_rules = image_rules
        self._threads = ThreadPoolExecutor(MAX_LONG, thread_name_prefix="encode")
        self._slots = asyncio.Semaphore(MAX_LONG)
        self._slot_seconds = slot_seconds

    async def chat(self, conversation: Conversation, *, context_tokens: int | None = None) -> Prompt:
        """Return a conversation's prompt, up to where the answer begins."""
        size = sum(turn.num_characters for turn in conversation.turns)
        size += sum(tool.num_characters for tool in conversation.tools)
        return await self._run(size, lambda: self.chat_prompt(conversation, context_tokens=context_tokens))

    async def texts(self, prompts: Sequence[str | list[int]], *, context_tokens: int | None = None) -> list[list[int]]:
        """Return the ids of bare prompts, in which control spellings are plain text; ids stay as they are."""
        written = [prompt for prompt in prompts if isinstance(prompt, str)]
        for prompt in written:
            refuse_hopeless(self._tokenizer.floor, "prompt", [prompt], context_tokens)
        size = sum(map(len, written))  # many short ones keep the loop as busy as a long one
        return [await self._text(size, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def between(
        self, prompts: Sequence[str | list[int]], suffix: str, *, context_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the ids that ask for what stands between each prompt and the suffix, in which all is plain text.

        Ids stay as they are.  Raises a 400 for a model that was not taught to.
        """
        if self._fill_in is None:
            rule = "this model has no tokens for filling in; send the prompt alone"
            raise refuse("suffix", rule, code="suffix_not_supported")
        for prompt in prompts:
            written = [prompt, suffix] if isinstance(prompt, str) else [suffix]
            refuse_hopeless(self._tokenizer.floor, "prompt", written, context_tokens)
        opening = self._tokenizer.plain_ids("", is_whole_prompt=True)
        size = len(suffix) + sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        after = await self._run(size, lambda: self._tokenizer.plain_ids(suffix))
        found = []
        for prompt in prompts:
            before = await self._stretch(size, prompt) if isinstance(prompt, str) else prompt
            found.append(self._fill_in.ids(opening, before, after))
        return found

    def chat_prompt(self, conversation: Conversation, *, context_tokens: int | None = None) -> Prompt:
        """Return a conversation's prompt; blocks for as long as that takes."""
        if self._dialect.renderer is None:
            raise refuse("", f"{self._dialect.no_chat}; use /v1/completions", code="chat_template_missing")
        ids = self._dialect.renderer.render(conversation, context_tokens=context_tokens)
        return place(ids, conversation.pictures, self._image_rules, self._vocab_tokens)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _text(self, num_characters: int, prompt: str) -> list[int]:
        return await self._run(num_characters, lambda: self._tokenizer.plain_ids(prompt, is_whole_prompt=True))

    async def _stretch(self, num_characters: int, text: str) -> list[int]:
        return await self._run(num_characters, lambda: self._tokenizer.plain_ids(text))

    async def _run(self, num_characters: int, work: Callable[[], Result]) -> Result:
        if num_characters < LONG_CHARACTERS:
            return work()
        try:
            async with asyncio.timeout(self._slot_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded("too many long prompts at once", retry_after=self._slot_seconds / 2) from None
        # Shielded: a thread cannot be stopped, so when its caller goes, its place must stay taken until it ends.
        return await asyncio.shield(asyncio.create_task(self._in_thread(work), name="encode"))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._slots.release()
