"""What does an answer of /v1/completions look like on the wire, with its prompt shown before it or not?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from services.recipe.detokenize import Detokenizer
from services.recipe.replies import OpenAiReplies
from services.recipe.token_scores import LEAST_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proto.common_pb2 import PositionLogprobs
    from services.recipe.choices import Choice
    from services.recipe.tokenizer import PromptTokenizer
    from services.recipe.transcript import Piece, Score


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown. offsets: where each token begins, in characters; empty where logprobs are not told."""

    text: str
    ids: Sequence[int] = ()
    offsets: Sequence[int] = ()

    @classmethod
    def of(cls, prompt: str | Sequence[int], tokenizer: PromptTokenizer) -> Echo:
        """Return a prompt as it was given; token ids are spelled out, special ones left out."""
        return cls(prompt if isinstance(prompt, str) else Detokenizer(tokenizer.pieces).feed(prompt))

    @classmethod
    def scored(cls, ids: Sequence[int], tokenizer: PromptTokenizer) -> Echo:
        """Return the text of these tokens, and where each begins."""
        read = Detokenizer(tokenizer.pieces)
        text, offsets = "", []
        for token_id in ids:
            offsets.append(len(text))
            text += read.feed((token_id,))
        return cls(text, ids, offsets)


class CompletionReplies(OpenAiReplies):
    """Answers of /v1/completions. echoes: what to show before each prompt's answers, by prompt; empty without echo."""

    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    no_logprobs: ClassVar[dict[str, Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def __init__(self, *args: Any, echoes: Sequence[Echo] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._echoes = echoes

    def opening(self, choice: Choice) -> bytes:
        job = choice.job
        echo, ids = self._echo(choice), self._prompt_ids(job)
        if not echo.text and not ids and not echo.ids:
            return b""
        logprobs = self._echoed(echo, choice.prompt_scores)
        return self._frame({"index": job.choice, "text": echo.text, "logprobs": logprobs, "finish_reason": None, **ids})

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        return self._frame(
            {
                "index": choice.job.choice,
                "text": piece.text,
                "logprobs": self._logprobs(piece.scores, len(self._echo(choice).text)),
                "finish_reason": piece.finish_reason,
                **self._ids(piece),
            }
        )

    def _choice(self, choice: Choice, said: Piece) -> dict[str, Any]:
        echo = self._echo(choice)
        of_prompt = self._echoed(echo, choice.prompt_scores)
        logprobs = self._logprobs(said.scores, len(echo.text)) or (self.no_logprobs if of_prompt else None)
        if of_prompt is not None and logprobs is not None:
            logprobs = {name: told + logprobs[name] for name, told in of_prompt.items()}
        return {"index": choice.job.choice, "text": echo.text + said.text, "logprobs": logprobs}

    def _echo(self, choice: Choice) -> Echo:
        return self._echoes[choice.job.prompt] if self._echoes else _NO_ECHO

    def _echoed(self, echo: Echo, scores: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        """Return the logprobs of a prompt: its first token has none, since nothing precedes it."""
        if not echo.ids:
            return None
        return {
            "tokens": [self._tokenizer.spelling(token_id) for token_id in echo.ids],
            "token_logprobs": [None, *(_told(score.chosen.logprob) for score in scores)],
            "top_logprobs": [None, *map(self._top, scores)],
            "text_offset": list(echo.offsets),
        }

    def _logprobs(self, scores: Sequence[Score], num_before: int) -> dict[str, Any] | None:
        """num_before: characters that are shown before the answer."""
        if not scores:
            return None
        return {
            "tokens": [self._tokenizer.spelling(score.position.chosen.token_id) for score in scores],
            "token_logprobs": [_told(score.position.chosen.logprob) for score in scores],
            "top_logprobs": [self._top(score.position) for score in scores],
            "text_offset": [num_before + score.offset for score in scores],
        }

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Return the likeliest tokens, and the one that stands there if it is none of them, as OpenAI does."""
        told = {self._tokenizer.spelling(token.token_id): _told(token.logprob) for token in position.top}
        told.setdefault(self._tokenizer.spelling(position.chosen.token_id), _told(position.chosen.logprob))
        return told


_NO_ECHO = Echo("")


def _told(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
