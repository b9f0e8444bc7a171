"""How are the requests of OpenAI's Responses API understood, generated and remembered?"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from services.recipe.answering import Answer, Caller, Endpoint, check_model
from services.recipe.generating import Front, Generating, Understood
from services.recipe.plain_endpoint import PlainEndpoint
from services.recipe.response_state import Item, ResponseState, StoredResponse
from services.recipe.responses_background import Background
from services.recipe.responses_context import (
    earlier_items,
    fitting_prompt,
    need_state,
    told_conversation,
)
from services.recipe.responses_events import ResponsesReplies
from services.recipe.responses_schema import References, ResponsesRequest, read_references, read_request
from services.recipe.schema import read_model
from services.recipe.shapes import OPENAI, Shape, named_frame

NO_REFERENCES = References("", "", stores=None, is_background=False)


@dataclass(frozen=True, slots=True)
class UnderstoodResponse(Understood):
    """And what is to be remembered of it."""

    references: References = NO_REFERENCES
    input_items: Sequence[Item] = ()
    stores: bool = False


class ResponsesEndpoint(Endpoint):
    """POST /v1/responses. background: None when there is no state."""

    operation: ClassVar[str] = "responses"
    prompt_field: ClassVar[str] = "input"
    shape: ClassVar[Shape] = OPENAI

    def __init__(self, front: Front, background: Background | None) -> None:
        super().__init__(front)
        self._background = background
        self._state: ResponseState | None = background.state if background else None

    async def understand(self, body: dict[str, Any], caller: Caller) -> Understood:
        model = self.front.model
        check_model(read_model(body), model.name)
        references = read_references(body)
        stores = need_state(references, self._state)
        earlier = await earlier_items(references, self._state, caller.tenant)
        asked = read_request(body, model.rules, earlier)
        prompt = await fitting_prompt(
            model.encoder,
            await self.front.fetcher.fetched(asked.conversation),
            self.front.context_tokens,
            answer_tokens=asked.rules.max_tokens or 1,
            drops_oldest=asked.drops_oldest,
        )
        has_scores = asked.sampling.num_logprobs is not None
        echo = self._echo(asked, references, stores=stores)
        return UnderstoodResponse(
            asked.sampling,
            asked.rules,
            [prompt],
            lambda: model.dialect.parser(asked.conversation),
            ResponsesReplies(caller.request_id, model.tokenizer, echo, seals=asked.seals, has_scores=has_scores),
            max_calls=None if asked.constraint.tools.is_parallel else 1,
            grammar=await self.front.grammar(asked.constraint, asked.conversation),
            references=references,
            input_items=asked.input_items,
            stores=stores,
        )

    async def perform(self, answer: Answer, understood: Understood) -> bytes:
        assert isinstance(understood, UnderstoodResponse)
        replies = understood.replies
        assert isinstance(replies, ResponsesReplies)
        generating = answer.generating(understood)
        if understood.references.is_background:
            return await self._detach(answer, understood, generating, replies)
        if understood.rules.is_stream:
            await answer.tell(generating, replies)
            event = replies.ended(generating.choices)
            await self._remember(answer.caller, understood, event["response"])
            return named_frame(event)
        await generating.run(generating.keep)
        body = replies.whole_body(generating.choices)
        await self._remember(answer.caller, understood, body)
        return orjson.dumps(body)

    async def _detach(
        self, answer: Answer, understood: UnderstoodResponse, generating: Generating, replies: ResponsesReplies
    ) -> bytes:
        """Generate it in the background; a caller who wants a stream follows like any other."""
        assert self._background is not None
        queued = replies.bare("queued")
        record = self._record(answer.caller, understood, queued, owner=self._background.owner)
        await self._background.start(record, generating, replies.twin())
        if not understood.rules.is_stream:
            return orjson.dumps(queued)
        replies.followed = -1
        async with answer.stream.pinging():
            async for event in self._background.follow(record.tenant, record.id, -1):
                if event:
                    await answer.stream.write(named_json(event))
                    replies.followed += 1
        return b""

    async def _remember(self, caller: Caller, understood: UnderstoodResponse, body: Mapping[str, Any]) -> None:
        if not understood.stores or self._background is None:
            return
        state, record = self._background.state, self._record(caller, understood, body, owner=self._background.owner)
        if not record.conversation_id:
            await state.add(record)
            return
        # What is said belongs to the conversation from the moment that the response is finished, and not without.
        unfinished = self._record(caller, understood, {**body, "status": "in_progress"}, owner=record.owner)
        await state.add(unfinished)
        await state.finish(record.tenant, record.id, record.status, body)

    def _record(
        self, caller: Caller, understood: UnderstoodResponse, body: Mapping[str, Any], *, owner: str
    ) -> StoredResponse:
        references = understood.references
        return StoredResponse(
            id=understood.replies.id,
            tenant=caller.tenant,
            status=body["status"],
            body=body,
            input_items=understood.input_items,
            previous_response_id=references.previous_response_id,
            conversation_id=references.conversation_id,
            owner=owner,
            keeps_events=references.is_background and understood.rules.is_stream,
            created_at=time.time(),
        )

    def _echo(self, asked: ResponsesRequest, references: References, *, stores: bool) -> dict[str, Any]:
        return {
            **asked.echo,
            "model": self.front.model.name,
            "background": references.is_background,
            "store": stores,
            "previous_response_id": references.previous_response_id or None,
            "conversation": told_conversation(references),
        }


class InputTokensEndpoint(PlainEndpoint):
    """POST /v1/responses/input_tokens."""

    def __init__(self, front: Front, background: Background | None) -> None:
        super().__init__(front)
        self._state = background.state if background else None

    async def answer(self, body: dict[str, Any], caller: Caller) -> dict[str, Any]:
        model = self.front.model
        body = {"model": model.name, **body}
        check_model(read_model(body), model.name)
        references = read_references(body)
        need_state(references, self._state)
        earlier = await earlier_items(references, self._state, caller.tenant)
        asked = read_request(body, model.rules, earlier, counts_only=True)
        prompt = await fitting_prompt(
            model.encoder,
            await self.front.fetcher.fetched(asked.conversation),
            self.front.context_tokens,
            answer_tokens=1,
            drops_oldest=asked.drops_oldest,
        )
        return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}


def named_json(event: bytes) -> bytes:
    """Return a stored event as a server-sent one; its type is the first thing in it."""
    kind = event[len(b'{"type":"') :].split(b'"', 1)[0]
    return b"event: " + kind + b"\ndata: " + event + b"\n\n"
