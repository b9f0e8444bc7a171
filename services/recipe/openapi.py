"""What does the API say of itself? GET /openapi.json, and a page that shows it at /docs."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.recipe import openapi_answers as answers
from services.recipe import openapi_fields as fields
from services.recipe.docs_page import page_with_headers
from services.recipe.openapi_parts import COUNT, FLAG, TEXT, Schema, one_of, said

VERSION = "1"


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. body: of requests, {} for none; streams: whether the answer may be server-sent events."""

    tag: str
    summary: str
    answer: Schema
    body: Schema | None = None
    query: tuple[tuple[str, Schema], ...] = ()
    streams: bool = False
    is_open: bool = False
    """Whether it needs no key."""


_STATE, _OPENAI, _ANTHROPIC, _OURS = "State", "OpenAI", "Anthropic", "Fathom"
_PAGING: Final = (
    ("after", said("an item's id: those behind it", TEXT)),
    ("limit", COUNT | {"maximum": 100}),
    ("order", one_of("asc", "desc")),
    ("include", TEXT),
)
_FOLLOWING: Final = (("stream", FLAG), ("starting_after", {"type": "integer", "minimum": 0}), ("include", TEXT))
OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("post", "/v1/chat/completions"): Operation(
        _OPENAI, "Answer a conversation", answers.CHAT, fields.CHAT, streams=True
    ),
    ("post", "/v1/completions"): Operation(
        _OPENAI, "Go on with texts or token ids", answers.COMPLETION, fields.COMPLETION, streams=True
    ),
    ("post", "/v1/responses"): Operation(
        _OPENAI, "Answer, with state where there is some", answers.RESPONSE, fields.RESPONSE, streams=True
    ),
    ("post", "/v1/responses/input_tokens"): Operation(
        _OPENAI, "Count the tokens of a response's prompt", answers.INPUT_TOKENS, fields.INPUT_TOKENS
    ),
    ("get", "/v1/responses/{response_id}"): Operation(
        _STATE, "Show a response, or follow its events", answers.RESPONSE, query=_FOLLOWING, streams=True
    ),
    ("delete", "/v1/responses/{response_id}"): Operation(_STATE, "Delete a response", answers.DELETED),
    ("post", "/v1/responses/{response_id}/cancel"): Operation(_STATE, "Stop a background response", answers.RESPONSE),
    ("get", "/v1/responses/{response_id}/input_items"): Operation(
        _STATE, "List what a response's request added", answers.PAGE, query=_PAGING
    ),
    ("post", "/v1/conversations"): Operation(_STATE, "Make a conversation", answers.CONVERSATION, fields.CONVERSATION),
    ("get", "/v1/conversations/{conversation_id}"): Operation(_STATE, "Show a conversation", answers.CONVERSATION),
    ("post", "/v1/conversations/{conversation_id}"): Operation(
        _STATE, "Replace a conversation's metadata", answers.CONVERSATION, fields.METADATA_ALONE
    ),
    ("delete", "/v1/conversations/{conversation_id}"): Operation(_STATE, "Delete a conversation", answers.DELETED),
    ("get", "/v1/conversations/{conversation_id}/items"): Operation(
        _STATE, "List a conversation's items", answers.PAGE, query=_PAGING
    ),
    ("post", "/v1/conversations/{conversation_id}/items"): Operation(
        _STATE, "Append items to a conversation", answers.PAGE, fields.ITEMS, query=(("include", TEXT),)
    ),
    ("get", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(_STATE, "Show an item", answers.ITEM),
    ("delete", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(
        _STATE, "Delete an item", answers.CONVERSATION
    ),
    ("post", "/v1/messages"): Operation(
        _ANTHROPIC, "Answer a conversation", answers.MESSAGE, fields.ANTHROPIC, streams=True
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        _ANTHROPIC, "Count the tokens of a message's prompt", answers.COUNTED, fields.ANTHROPIC_COUNT
    ),
    ("get", "/v1/models"): Operation(_OURS, "List the model, in either vendor's shape", answers.MODELS),
    ("get", "/v1/models/{name}"): Operation(_OURS, "Show the model", answers.MODEL),
    ("post", "/tokenize"): Operation(_OURS, "Texts and conversations to token ids", answers.TOKENIZED, fields.TOKENIZE),
    ("post", "/detokenize"): Operation(_OURS, "Token ids to text", answers.DETOKENIZED, fields.DETOKENIZE),
    ("get", "/health"): Operation(_OURS, "Say whether the model can be reached", answers.HEALTH, is_open=True),
}
_ERRORS: Final = {
    "400": "A field is wrong; the error names it",
    "401": "No key, or one that is not known",
    "403": "The key is not for that",
    "404": "There is no such model, response, conversation or item",
    "408": "The body stopped coming",
    "413": "The body, or its images, are too large",
    "429": "Too much at once; retry-after says when to try again",
    "500": "Something broke; the message has an id to look for in the logs",
    "503": "Nobody can answer now; retry-after says when to try again (529 below /v1/messages)",
    "504": "The answer took too long",
}
_HEADERS: Final[tuple[tuple[str, Schema], ...]] = (
    (
        "x-request-id",
        said("an id of the caller's own, shown again", {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}),
    ),
)
_POST_HEADERS: Final[tuple[tuple[str, Schema], ...]] = (
    ("Idempotency-Key", said("the same key and body again get the first answer; not for streams", TEXT)),
    ("x-fathom-retention", said("how long the prompt's KV is worth keeping", one_of("chat", "agent"))),
    ("traceparent", said("W3C trace context", TEXT)),
)


def describe(routes: list[Route]) -> dict[str, Any]:
    """Return the OpenAPI description of these routes; raise KeyError for one that has no words here."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            asked = OPERATIONS[method.lower(), path]
            paths.setdefault(path, {})[method.lower()] = _described(asked, path, method.lower())
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer sk-..."},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fathom",
            "version": VERSION,
            "description": "OpenAI's and Anthropic's protocols on one port. A field that is null asks for nothing; "
            "what is not described here is a 400 that names it. docs/api.md says what differs from the vendors'. Keys "
            "are needed where the operator set a file of them.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": schemes,
            "schemas": {"OpenAiError": answers.OPENAI_ERROR, "AnthropicError": answers.ANTHROPIC_ERROR},
        },
        "security": [{"bearer": []}, {"header": []}, {}],
    }


def documented(routes: list[Route]) -> list[Route]:
    """Return the routes, and those that describe them."""
    body = orjson.dumps(describe(routes))
    shown, headers = page_with_headers()

    async def schema(_request: Request) -> Response:
        return Response(body, HTTPStatus.OK, media_type="application/json")

    async def page(_request: Request) -> Response:
        return Response(shown, HTTPStatus.OK, headers, "text/html")

    return [*routes, Route("/openapi.json", schema, methods=["GET"]), Route("/docs", page, methods=["GET"])]


def _described(asked: Operation, path: str, method: str) -> dict[str, Any]:
    in_path = [(part[1:-1], TEXT) for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": schema} for name, schema in in_path]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in asked.query]
    headers = _HEADERS + (_POST_HEADERS if method == "post" else ())
    parameters += [{"name": name, "in": "header", "schema": schema} for name, schema in headers]
    content: dict[str, Any] = {"application/json": {"schema": asked.answer}}
    if asked.streams:
        content["text/event-stream"] = {"schema": said("server-sent events, where stream is true", TEXT)}
    told: dict[str, Any] = {
        "tags": [asked.tag],
        "operationId": f"{method}_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": asked.summary,
        "parameters": parameters,
        "responses": {"200": {"description": "The answer", "content": content}} | _errors(asked.tag),
    }
    if asked.body is not None:
        is_needed = bool(asked.body.get("required"))
        told["requestBody"] = {"required": is_needed, "content": {"application/json": {"schema": asked.body}}}
    if asked.is_open:
        told["security"] = []
    return told


def _errors(tag: str) -> dict[str, Any]:
    name = "AnthropicError" if tag == _ANTHROPIC else "OpenAiError"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {
        status: {"description": meaning, "content": {"application/json": {"schema": schema}}}
        for status, meaning in _ERRORS.items()
    }
