"""How are OpenAI's chat completions and completions understood?"""

from collections.abc import Sequence
from typing import Any, ClassVar

from services.recipe.answering import Caller, Endpoint, check_model
from services.recipe.completion_replies import CompletionReplies, Echo
from services.recipe.dialect import PlainParser
from services.recipe.framing import content_of
from services.recipe.generating import Understood
from services.recipe.grammars import Sketch
from services.recipe.pictures import Prompt
from services.recipe.refusals import refuse
from services.recipe.replies import ChatReplies
from services.recipe.schema import CompletionRequest, read_chat, read_completion, read_model
from services.recipe.shapes import OPENAI, Shape
from services.recipe.tokenizer import PromptTokenizer

MAX_PROMPT_SCORES = 1 << 16
"""Logprobs of one request's prompts, chosen and alternative ones; the engines allow one prompt as many."""


class ChatEndpoint(Endpoint):
    """POST /v1/chat/completions."""

    operation: ClassVar[str] = "chat"
    prompt_field: ClassVar[str] = "messages"
    shape: ClassVar[Shape] = OPENAI

    async def understand(self, body: dict[str, Any], caller: Caller) -> Understood:
        model = self.front.model
        check_model(read_model(body), model.name)
        asked = read_chat(body, model.rules)
        prompt = await self.front.prompt(asked.conversation)
        replies = ChatReplies(
            caller.request_id,
            model.name,
            model.tokenizer,
            asked.rules,
            has_scores=asked.sampling.num_logprobs is not None,
            reasons=model.dialect.reasons,
            thinks=asked.conversation.effort != "none",
            names_call=bool(asked.constraint.tools.names),
        )
        return Understood(
            asked.sampling,
            asked.rules,
            [prompt],
            lambda: model.dialect.parser(asked.conversation),
            replies,
            max_calls=None if asked.constraint.tools.is_parallel else 1,
            grammar=await self.front.grammar(asked.constraint, asked.conversation),
        )


class CompletionEndpoint(Endpoint):
    """POST /v1/completions."""

    operation: ClassVar[str] = "text_completion"
    prompt_field: ClassVar[str] = "prompt"
    shape: ClassVar[Shape] = OPENAI

    async def understand(self, body: dict[str, Any], caller: Caller) -> Understood:
        model = self.front.model
        check_model(read_model(body), model.name)
        asked = read_completion(body, vocab_tokens=model.rules.vocab_tokens)
        context_tokens = self.front.context_tokens
        if asked.suffix:
            prompts = await model.encoder.between(asked.prompts, asked.suffix, context_tokens=context_tokens)
        else:
            prompts = await model.encoder.texts(asked.prompts, context_tokens=context_tokens)
        check_scores(prompts, asked)
        replies = CompletionReplies(
            caller.request_id,
            model.name,
            model.tokenizer,
            asked.rules,
            has_scores=asked.sampling.num_logprobs is not None,
            echoes=_echoes(asked, prompts, model.tokenizer) if asked.echo else (),
        )
        pieces = model.tokenizer.pieces
        grammar = None
        if (content := content_of(asked.format)) is not None:
            grammar = await self.front.compiler.compile(Sketch((content,)))
        return Understood(
            asked.sampling,
            asked.rules,
            [*map(Prompt, prompts)],
            lambda: PlainParser(pieces),
            replies,
            grammar=grammar,
            num_prompt_logprobs=asked.num_prompt_logprobs,
        )


def check_scores(prompts: Sequence[Sequence[int]], asked: CompletionRequest) -> None:
    """Raise a 400 for more logprobs of prompts than one answer may hold."""
    if asked.num_prompt_logprobs is None:
        return
    num_tokens = asked.rules.num_choices * sum(map(len, prompts))
    most = MAX_PROMPT_SCORES // (1 + asked.num_prompt_logprobs)
    if num_tokens > most:
        rule = (
            f"with echo and logprobs {asked.num_prompt_logprobs} may have {most} tokens, times n; this has {num_tokens}"
        )
        raise refuse("prompt", rule, code="too_many_logprobs")


def _echoes(asked: CompletionRequest, prompts: Sequence[Sequence[int]], tokenizer: PromptTokenizer) -> list[Echo]:
    if asked.num_prompt_logprobs is None:
        return [Echo.of(given, tokenizer) for given in asked.prompts]
    # What is scored are tokens, so it is their text that is shown.
    return [Echo.scored(ids, tokenizer) for ids in prompts]
