"""What is known about one answer's choices, and what did they cost?"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proto.common_pb2 import PositionLogprobs
from services.recipe.jobs import Job
from services.recipe.transcript import Piece, Transcript


@dataclass(slots=True)
class Choice:
    """One choice on its way to the caller. `pieces` holds what was shown, for whole answers.

    prompt_scores: of the prompt's tokens from the second on, where they were asked for, once its first token is there.
    """

    job: Job
    transcript: Transcript
    pieces: list[Piece] = field(default_factory=list)
    prompt_scores: Sequence[PositionLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens of one request. A prompt counts once, however many choices continue it.

    Cached tokens are some of the prompt's, reasoning tokens some of the completion's.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


def spent(choices: Sequence[Choice]) -> Spent:
    """Return what the choices have cost so far."""
    if len(choices) == 1:  # nearly all requests, and each is asked this several times
        choice, transcript = choices[0], choices[0].transcript
        return Spent(
            len(choice.job.prompt_ids),
            transcript.cached_tokens,
            transcript.num_tokens,
            transcript.num_reasoning_tokens,
        )
    firsts = {choice.job.prompt: choice for choice in reversed(choices)}.values()
    return Spent(
        prompt_tokens=sum(len(choice.job.prompt_ids) for choice in firsts),
        cached_tokens=sum(choice.transcript.cached_tokens for choice in firsts),
        completion_tokens=sum(choice.transcript.num_tokens for choice in choices),
        reasoning_tokens=sum(choice.transcript.num_reasoning_tokens for choice in choices),
    )


def join(pieces: Sequence[Piece]) -> Piece:
    """Return what all the pieces say, as one."""
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        scores=[score for piece in pieces for score in piece.scores],
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=[call for piece in pieces for call in piece.calls],
    )
