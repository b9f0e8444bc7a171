"""What does a Responses request build upon, and how is that fetched from, and added to, the state?"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from services.recipe.conversation import Conversation
from services.recipe.encode import Encoder
from services.recipe.pictures import Prompt
from services.recipe.refusals import ApiError, refuse
from services.recipe.response_state import UNFINISHED, Item, ResponseState
from services.recipe.responses_items import MAX_ITEMS
from services.recipe.responses_schema import References, drop_oldest

PAGE_ITEMS = 100
_NO_STATE = "needs state, which this server keeps none of (its setting state_url is empty)"


def need_state(references: References, state: ResponseState | None) -> bool:
    """Return whether the response is to be kept; raise a 400 for what cannot be without state."""
    stores = references.stores if references.stores is not None else state is not None
    asked = {
        "previous_response_id": references.previous_response_id,
        "conversation": references.conversation_id,
        "background": references.is_background,
        "store": references.stores,
    }
    for field, value in asked.items():
        if value and state is None:
            raise refuse(field, _NO_STATE, code="state_is_off")
    if not stores and (references.is_background or references.conversation_id):
        raise refuse("store", "must be true with background and with conversation")
    return stores


async def earlier_items(references: References, state: ResponseState | None, tenant: str) -> Sequence[Item]:
    """Return the items that come before a request's own; raise a 400 or 404 when they are not there."""
    if state is None:
        return ()
    if references.previous_response_id:
        return await _said_before(references.previous_response_id, state, tenant)
    if references.conversation_id:
        return await _conversation(references.conversation_id, state, tenant)
    return ()


async def _said_before(response_id: str, state: ResponseState, tenant: str) -> Sequence[Item]:
    field = "previous_response_id"
    lineage = await state.lineage(tenant, response_id)
    if not lineage:
        rule = "there is no such response, or one before it was deleted or has expired"
        raise refuse(field, rule, code="previous_response_not_found")
    if lineage[-1].status in UNFINISHED:
        raise refuse(field, "is not finished yet", code="previous_response_not_finished")
    if any(response.conversation_id for response in lineage):
        raise refuse(field, "belongs to a conversation; name that in conversation")
    return [item for response in lineage for item in (*response.input_items, *response.body["output"])]


async def _conversation(conversation_id: str, state: ResponseState, tenant: str) -> Sequence[Item]:
    items: list[Item] = []
    has_more = True
    while has_more:
        after = str(items[-1]["id"]) if items else ""
        page = await state.conversation_items(tenant, conversation_id, after=after, limit=PAGE_ITEMS, is_ascending=True)
        if page is None:
            raise not_found("conversation", conversation_id)
        items += page.items
        has_more = page.has_more
        if len(items) > MAX_ITEMS:
            raise refuse("conversation", f"has more than {MAX_ITEMS} items")
    return items


def not_found(what: str, name: str) -> ApiError:
    """Return the 404 for something of that kind that is not there."""
    rule = f"there is no {what.replace('_', ' ')} {name[:100]!r}"
    return ApiError(HTTPStatus.NOT_FOUND, rule, param=what, code="not_found")


async def fitting_prompt(
    encoder: Encoder, conversation: Conversation, context_tokens: int, *, answer_tokens: int, drops_oldest: bool
) -> Prompt:
    """Return a conversation's prompt, of its newest turns alone when all do not fit and that is allowed.

    A result of a tool never stays without its call. Raises a 400 that names `input` for what does not fit.
    """
    turns = conversation.turns
    try:
        prompt = await encoder.chat(conversation, context_tokens=context_tokens)
        if not drops_oldest or len(prompt.ids) + answer_tokens <= context_tokens:
            return prompt
    except ApiError as exc:
        if not drops_oldest or exc.code != "context_length_exceeded":
            raise _about_input(exc) from None
    cuts = [at for at in range(1, len(turns)) if turns[at].role != "tool" and not _is_leading(conversation, at)]
    low, high, found = 0, len(cuts) - 1, None
    while low <= high:  # the fewest turns left out, with one encoding for each halving
        middle = (low + high) // 2
        shorter = drop_oldest(conversation, len(turns) - cuts[middle])
        try:
            prompt = await encoder.chat(shorter, context_tokens=context_tokens)
            fits = len(prompt.ids) + answer_tokens <= context_tokens
        except ApiError as exc:
            if exc.code != "context_length_exceeded":
                raise _about_input(exc) from None
            fits = False
        if fits:
            found, high = prompt, middle - 1
        else:
            low = middle + 1
    if found is None:
        raise refuse("input", "does not fit the context, however much is left out", code="context_length_exceeded")
    return found


def _is_leading(conversation: Conversation, at: int) -> bool:
    """Return whether everything before this turn leads the conversation, so that nothing would be left out."""
    return all(turn.role in {"system", "developer"} for turn in conversation.turns[:at])


def _about_input(error: ApiError) -> ApiError:
    """Return the error with our word for what others call messages."""
    if not error.param.startswith("messages"):
        return error
    message = error.message.replace("messages", "input", 1)
    return ApiError(
        error.status, message, param="input", code=error.code, retry_after_seconds=error.retry_after_seconds
    )


def told_conversation(references: References) -> Mapping[str, Any] | None:
    """Return what a response says of its conversation."""
    return {"id": references.conversation_id} if references.conversation_id else None
