"""Which path is answered by what?"""

from starlette.routing import Route
from starlette.types import ASGIApp

from services.recipe.anthropic_endpoint import CountTokensEndpoint, MessagesEndpoint
from services.recipe.conversations_routes import Conversations
from services.recipe.endpoints import ChatEndpoint, CompletionEndpoint
from services.recipe.generating import Front
from services.recipe.models import Models
from services.recipe.openapi import documented
from services.recipe.responses_background import Background
from services.recipe.responses_endpoint import InputTokensEndpoint, ResponsesEndpoint
from services.recipe.responses_routes import StoredResponses
from services.recipe.tokenizing import DetokenizeEndpoint, TokenizeEndpoint


def public_routes(front: Front, background: Background | None) -> list[Route]:
    """Return all routes of the public API. background: None when nothing is kept between requests."""
    models = Models(front)
    posts: dict[str, ASGIApp] = {
        "/v1/chat/completions": ChatEndpoint(front),
        "/v1/completions": CompletionEndpoint(front),
        "/v1/responses": ResponsesEndpoint(front, background),
        "/v1/responses/input_tokens": InputTokensEndpoint(front, background),
        "/v1/messages": MessagesEndpoint(front),
        "/v1/messages/count_tokens": CountTokensEndpoint(front),
        "/tokenize": TokenizeEndpoint(front),
        "/detokenize": DetokenizeEndpoint(front),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        *StoredResponses(background).routes(),
        *Conversations(front, background.state if background else None).routes(),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.show, methods=["GET"]),
        Route("/health", models.health, methods=["GET"]),
    ]
    return documented(routes)
