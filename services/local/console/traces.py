"""Which traces are kept, and which go first when room is needed?"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.local.console.spans import Span

MAX_TRACES = 500
MAX_BYTES = 64 << 20
MAX_TRACE_BYTES = 8 << 20
"""A request of a million tokens in chunks of 512 makes some 2,000 spans, 2.5 MB."""
EDGE = "recipe"
"""Who ends last: without its span a request has no name."""


@dataclass(slots=True)
class _Trace:
    spans: dict[str, Span] = field(default_factory=dict)
    num_bytes: int = 0


class TraceStore:
    """The newest traces by when something last came for them, within two bounds. Not for several threads."""

    def __init__(self, *, max_traces: int = MAX_TRACES, max_bytes: int = MAX_BYTES) -> None:
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self.num_bytes = 0
        self.num_evicted = 0
        """Traces given up for newer ones."""
        self.num_overflowing = 0
        """Spans refused since their trace was full."""

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, spans: Iterable[Span]) -> None:
        """Keep spans; one that is here already (a sender that heard no answer repeats itself) is not kept twice."""
        for span in spans:
            trace = self._traces.setdefault(span.trace_id, _Trace())
            self._traces.move_to_end(span.trace_id)
            if span.span_id in trace.spans:
                continue
            size = span.num_bytes
            if trace.num_bytes + size > MAX_TRACE_BYTES and span.service != EDGE:
                self.num_overflowing += 1
                continue
            trace.spans[span.span_id] = span
            trace.num_bytes += size
            self.num_bytes += size
            self._evict()

    def newest(self) -> Iterator[list[Span]]:
        """Yield each trace's spans, newest trace first."""
        for trace in reversed(self._traces.values()):
            yield list(trace.spans.values())

    def _evict(self) -> None:
        while len(self._traces) > self._max_traces or self.num_bytes > self._max_bytes:
            _, oldest = self._traces.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            self.num_evicted += 1
