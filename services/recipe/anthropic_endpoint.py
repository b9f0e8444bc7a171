"""How are the requests of Anthropic's Messages API understood, and what does counting their tokens answer?"""

from typing import Any, ClassVar

from services.recipe.answering import Caller, Endpoint, check_model
from services.recipe.anthropic_events import MessagesReplies
from services.recipe.anthropic_schema import read_messages_request
from services.recipe.generating import Understood
from services.recipe.plain_endpoint import PlainEndpoint
from services.recipe.schema import read_model
from services.recipe.shapes import ANTHROPIC, Shape


class MessagesEndpoint(Endpoint):
    """POST /v1/messages."""

    operation: ClassVar[str] = "messages"
    prompt_field: ClassVar[str] = "messages"
    shape: ClassVar[Shape] = ANTHROPIC

    async def understand(self, body: dict[str, Any], caller: Caller) -> Understood:
        model = self.front.model
        check_model(read_model(body), model.name)
        asked = read_messages_request(body, model.rules)
        prompt = await self.front.prompt(asked.conversation)
        return Understood(
            asked.sampling,
            asked.rules,
            [prompt],
            lambda: model.dialect.parser(asked.conversation),
            MessagesReplies(caller.request_id, model.name, shows_thinking=asked.shows_thinking),
            max_calls=None if asked.constraint.tools.is_parallel else 1,
            grammar=await self.front.grammar(asked.constraint, asked.conversation),
        )


class CountTokensEndpoint(PlainEndpoint):
    """POST /v1/messages/count_tokens."""

    async def answer(self, body: dict[str, Any], _caller: Caller) -> dict[str, Any]:
        model = self.front.model
        check_model(read_model(body), model.name)
        asked = read_messages_request(body, model.rules, counts_only=True)
        prompt = await self.front.prompt(asked.conversation)
        return {"input_tokens": len(prompt.ids)}
