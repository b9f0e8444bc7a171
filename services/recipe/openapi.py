"""What does the API say of itself? GET /openapi.json, and a page that shows it at /docs."""

from http import HTTPStatus
from typing import Any

import orjson
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.recipe import openapi_fields as fields

VERSION = "1"
_BODIES: dict[str, tuple[str, fields.Schema]] = {
    "/v1/chat/completions": ("Answer a conversation (OpenAI)", fields.CHAT),
    "/v1/completions": ("Go on with texts or token ids (OpenAI)", fields.COMPLETION),
    "/v1/responses": ("Answer, with state where there is some (OpenAI)", fields.RESPONSE),
    "/v1/responses/input_tokens": ("Count the tokens of a response's prompt", fields.INPUT_TOKENS),
    "/v1/responses/{response_id}/cancel": ("Stop a background response", {}),
    "/v1/conversations": ("Make a conversation", fields.CONVERSATION),
    "/v1/conversations/{conversation_id}": ("Replace a conversation's metadata", fields.METADATA_ALONE),
    "/v1/conversations/{conversation_id}/items": ("Append items to a conversation", fields.ITEMS),
    "/v1/messages": ("Answer a conversation (Anthropic)", fields.ANTHROPIC),
    "/v1/messages/count_tokens": ("Count the tokens of a message's prompt", fields.ANTHROPIC_COUNT),
    "/tokenize": ("Texts and conversations to token ids", fields.TOKENIZE),
    "/detokenize": ("Token ids to text", fields.DETOKENIZE),
}
_SUMMARIES: dict[tuple[str, str], str] = {
    ("get", "/v1/responses/{response_id}"): "Show a response, or follow its events",
    ("delete", "/v1/responses/{response_id}"): "Delete a response",
    ("get", "/v1/responses/{response_id}/input_items"): "List a response's input",
    ("get", "/v1/conversations/{conversation_id}"): "Show a conversation",
    ("delete", "/v1/conversations/{conversation_id}"): "Delete a conversation",
    ("get", "/v1/conversations/{conversation_id}/items"): "List a conversation's items",
    ("get", "/v1/conversations/{conversation_id}/items/{item_id}"): "Show an item",
    ("delete", "/v1/conversations/{conversation_id}/items/{item_id}"): "Delete an item",
    ("get", "/v1/models"): "List the model, in either vendor's shape",
    ("get", "/v1/models/{name}"): "Show the model",
    ("get", "/health"): "Say whether the model can be reached",
}


def describe(routes: list[Route]) -> dict[str, Any]:
    """Return the OpenAPI description of these routes; raise KeyError for one that has no words here."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, method.lower())
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fathom", "version": VERSION, "description": "docs/api.md says what each field does."},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def documented(routes: list[Route]) -> list[Route]:
    """Return the routes, and those that describe them."""
    body = orjson.dumps(describe(routes))

    async def schema(_request: Request) -> Response:
        return Response(body, HTTPStatus.OK, media_type="application/json")

    async def page(_request: Request) -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title="Fathom")

    return [*routes, Route("/openapi.json", schema, methods=["GET"]), Route("/docs", page, methods=["GET"])]


def _operation(path: str, method: str) -> dict[str, Any]:
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": fields.TEXT}
        for part in path.split("/")
        if part.startswith("{")
    ]
    answers = {"200": {"description": "The answer"}, "4XX": {"description": "What is wrong, by field"}}
    answers |= {"5XX": {"description": "Nobody can answer now"}}
    if method != "post":
        return {"summary": _SUMMARIES[method, path], "parameters": parameters, "responses": answers}
    summary, body = _BODIES[path]
    content = {"required": bool(body.get("required")), "content": {"application/json": {"schema": body}}}
    asked = {"requestBody": content} if body else {}
    return {"summary": summary, "parameters": parameters, "responses": answers, **asked}
