"""How do OpenAI's two newer APIs spell logprobs?"""

from collections.abc import Iterable
from typing import Any

from services.recipe.tokenizer import PromptTokenizer
from services.recipe.transcript import Score

LEAST_LOGPROB = -9999.0
"""As OpenAI writes minus infinity, which JSON cannot."""


def told_scores(scores: Iterable[Score], tokenizer: PromptTokenizer) -> list[dict[str, Any]]:
    """Return one object per position: the token, its bytes, and the likeliest alternatives."""
    return [
        _token(score.position.chosen.token_id, score.position.chosen.logprob, tokenizer)
        | {"top_logprobs": [_token(token.token_id, token.logprob, tokenizer) for token in score.position.top]}
        for score in scores
    ]


def _token(token_id: int, logprob: float, tokenizer: PromptTokenizer) -> dict[str, Any]:
    # A special token has a spelling but adds no bytes to the text.
    piece = tokenizer.pieces[token_id] if token_id < tokenizer.num_tokens else b""
    return {"token": tokenizer.spelling(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(piece)}
