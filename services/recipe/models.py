"""Which model is served, and can it be reached? GET /v1/models in either vendor's shape, and GET /health."""

import time
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from services.chassis import errors
from services.recipe.answering import check_model
from services.recipe.generating import Front
from services.recipe.keys_visit import current_visit
from services.recipe.shapes import ANTHROPIC, shape_of


class Models:
    """The model list. Callers that send `anthropic-version` get Anthropic's objects, all others OpenAI's."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """Return the one model as a list, an empty one when the caller's key is not for it."""
        told = [self._model(request)] if current_visit().may_use(self._front.model.name) else []
        if shape_of(request.scope) is ANTHROPIC:
            end = told[0]["id"] if told else None
            return _json(HTTPStatus.OK, {"data": told, "first_id": end, "last_id": end, "has_more": False})
        return _json(HTTPStatus.OK, {"object": "list", "data": told})

    async def show(self, request: Request) -> Response:
        """Return the model of that name."""
        check_model(request.path_params["name"], self._front.model.name)
        return _json(HTTPStatus.OK, self._model(request))

    async def health(self, _request: Request) -> Response:
        """200 when the entrypoint answers and has the model."""
        try:
            card = await self._front.upstream.find_model()
            reason = "no ready replicas serve the model"
        except errors.FathomError as exc:
            card, reason = None, exc.message
        if card is None:
            unavailable = {"status": "unavailable", "reason": reason}
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, unavailable, {"retry-after": "1"})
        return _json(HTTPStatus.OK, {"status": "ok", "model": card.name})

    def _model(self, request: Request) -> dict[str, Any]:
        name, context_tokens = self._front.model.name, self._front.context_tokens
        if shape_of(request.scope) is ANTHROPIC:
            return {
                "id": name,
                "type": "model",
                "display_name": name,
                "created_at": datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z"),
                "lifecycle": "active",
                "max_input_tokens": context_tokens,
                "max_tokens": context_tokens,
            }
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "fathom",
            "max_model_len": context_tokens,
        }


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")
