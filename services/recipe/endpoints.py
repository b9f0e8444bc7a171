"""How are OpenAI's chat completions and completions understood?"""

from typing import Any, ClassVar

from services.recipe.answering import Caller, Endpoint, check_model
from services.recipe.dialect import PlainParser
from services.recipe.framing import content_of
from services.recipe.generating import Understood
from services.recipe.grammars import Sketch
from services.recipe.pictures import Prompt
from services.recipe.replies import ChatReplies, CompletionReplies, echo_text
from services.recipe.schema import read_chat, read_completion, read_model
from services.recipe.shapes import OPENAI, Shape


class ChatEndpoint(Endpoint):
    """POST /v1/chat/completions."""

    operation: ClassVar[str] = "chat"
    prompt_field: ClassVar[str] = "messages"
    shape: ClassVar[Shape] = OPENAI

    async def understand(self, body: dict[str, Any], caller: Caller) -> Understood:
        model = self.front.model
        check_model(read_model(body), model.name)
        asked = read_chat(body, model.rules)
        prompt = await model.encoder.chat(asked.conversation, context_tokens=self.front.context_tokens)
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
        prompts = await model.encoder.texts(asked.prompts, context_tokens=self.front.context_tokens)
        replies = CompletionReplies(
            caller.request_id,
            model.name,
            model.tokenizer,
            asked.rules,
            has_scores=asked.sampling.num_logprobs is not None,
            echoes=[echo_text(prompt, model.tokenizer) for prompt in asked.prompts] if asked.echo else (),
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
        )
