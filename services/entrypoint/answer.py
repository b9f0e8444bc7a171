"""What has the caller been told so far?

Counts the answer's tokens (the authority for usage), and makes sure that the first and the last event carry usage and
that nothing follows the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from proto.common_pb2 import FinishReason, Request, TokenEvent, Usage
from proto.prefill_pb2 import FirstToken
from services.chassis.errors import FathomError, to_stream_error


class Answer:
    """One request's events on their way to the recipe."""

    def __init__(self, request: Request, emit: Callable[[TokenEvent], None]) -> None:
        self._request_id = request.request_id
        self._emit = emit
        self._usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self.begun_seconds: float | None = None
        """Monotonic time of the first token."""
        self.finish_reason = FinishReason.FINISH_REASON_UNSPECIFIED
        """Set once the last event is out."""

    @property
    def usage(self) -> Usage:
        return self._usage

    def begin(self, first: FirstToken) -> None:
        """Forward prefill's token. Cached tokens are prefill's to know: decode finds all of its KV handed over."""
        self._usage.cached_tokens = first.cached_tokens
        self.begun_seconds = time.monotonic()
        first.token.prompt_logprobs.extend(first.prompt_logprobs)
        self._forward(first.token, with_usage=True)

    def add(self, event: TokenEvent) -> None:
        """Forward one step's tokens."""
        self._forward(event, with_usage=bool(event.finish_reason))

    def cancel(self) -> None:
        """Tell a caller that cancelled what was used until then."""
        self._end(TokenEvent(finish_reason=FinishReason.FINISH_REASON_CANCELLED))

    def fail(self, error: FathomError) -> None:
        self._end(TokenEvent(finish_reason=FinishReason.FINISH_REASON_ERROR, error=to_stream_error(error)))

    def _end(self, event: TokenEvent) -> None:
        if not self.finish_reason:
            self._forward(event, with_usage=True)

    def _forward(self, event: TokenEvent, *, with_usage: bool) -> None:
        assert not self.finish_reason, "an event after the last one"
        event.request_id = self._request_id
        self._usage.completion_tokens += len(event.token_ids)
        self.finish_reason = event.finish_reason
        if with_usage:
            event.usage.CopyFrom(self._usage)
        else:
            event.ClearField("usage")
        self._emit(event)
