"""Which ids does a text or a conversation become, and which text are ids? Our own two endpoints beside the vendors'."""

from typing import Any

from services.recipe.answering import Caller, check_model
from services.recipe.fields import Fields, is_id
from services.recipe.plain_endpoint import PlainEndpoint
from services.recipe.refusals import refuse
from services.recipe.schema import read_conversation

MAX_IDS = 1 << 20


class TokenizeEndpoint(PlainEndpoint):
    """POST /tokenize: {prompt} or {messages, tools, reasoning_effort} to {tokens, count}."""

    async def answer(self, body: dict[str, Any], _caller: Caller) -> dict[str, Any]:
        fields, model = Fields(body), self.front.model
        _check_name(fields, model.name)
        prompt = fields.take("prompt")
        if (prompt is None) == ("messages" not in body):
            raise refuse("prompt", "or messages must be there, and not both")
        if prompt is None:
            conversation, _use = read_conversation(fields, model.rules)
            fields.finish()
            encoded = await self.front.prompt(conversation)
            tokens = list(encoded.ids)
        else:
            if not isinstance(prompt, str):
                raise fields.wrong("prompt", "must be a string")
            fields.finish()
            (tokens,) = await model.encoder.texts([prompt], context_tokens=self.front.context_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.front.context_tokens}


class DetokenizeEndpoint(PlainEndpoint):
    """POST /detokenize: {tokens} to {prompt}, control tokens spelled out."""

    async def answer(self, body: dict[str, Any], _caller: Caller) -> dict[str, Any]:
        fields, tokenizer = Fields(body), self.front.model.tokenizer
        _check_name(fields, self.front.model.name)
        tokens, highest = fields.take("tokens"), tokenizer.num_tokens - 1
        if not isinstance(tokens, list) or len(tokens) > MAX_IDS or not all(is_id(i, highest) for i in tokens):
            raise fields.wrong("tokens", f"must be a list of at most {MAX_IDS} token ids from 0 to {highest}")
        fields.finish()
        spelled = {i: tokenizer.pieces[i] or tokenizer.spelling(i).encode() for i in set(tokens)}
        return {"prompt": b"".join(spelled[i] for i in tokens).decode("utf-8", "replace")}


def _check_name(fields: Fields, served: str) -> None:
    asked = fields.text("model")
    if asked is not None:
        check_model(asked, served)
