"""Which requests are traced when many come at once?"""

import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

AT_ONCE = 10.0
A_SECOND = 5.0
"""A trace of some fifteen spans in eight processes costs its request 1 to 1.5 ms, much for a warm one-token answer. A
person's requests are all traced; of a thousand alike a few tell as much as all (docs/adr/0021)."""


class FewASecond(Sampler):
    """Samples new traces as long as few begin: a bucket of AT_ONCE, refilled by A_SECOND.

    For traces that begin here: a caller's own decision, in its traceparent, is kept by `ParentBased`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = AT_ONCE
        self._filled_at = clock()

    def should_sample(
        self,
        parent_context: Context | None,  # noqa: ARG002 - the SDK's signature
        trace_id: int,  # noqa: ARG002 - the SDK's signature
        name: str,  # noqa: ARG002 - the SDK's signature
        kind: SpanKind | None = None,  # noqa: ARG002 - the SDK's signature
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,  # noqa: ARG002 - the SDK's signature
        trace_state: TraceState | None = None,  # noqa: ARG002 - the SDK's signature
    ) -> SamplingResult:
        """Return whether this trace is recorded."""
        now = self._clock()
        self._left = min(AT_ONCE, self._left + (now - self._filled_at) * A_SECOND)
        self._filled_at = now
        if self._left < 1:
            return SamplingResult(Decision.DROP)
        self._left -= 1
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self) -> str:
        """Return what this sampler is, for the SDK."""
        return f"FewASecond({AT_ONCE:g} at once, {A_SECOND:g} a second)"
