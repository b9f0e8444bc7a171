"""Which address of the console shows what?"""

import json
import time
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from services.local.console import pages
from services.local.console.collector import Counts
from services.local.console.journey import Journey
from services.local.console.requests import SHORTEST_PREFIX, find, newest
from services.local.console.traces import MAX_TRACES, TraceStore
from services.local.console.view import Watch
from services.local.console.web import HTML, JSON, Reply, Request, plain

ON_PAGE = 20
LIVE_SECONDS = 2


class Site:
    """The pages, and the same as JSON for `fathom trace`."""

    def __init__(self, store: TraceStore, counts: Counts, watch: Watch) -> None:
        self._store = store
        self._counts = counts
        self._watch = watch

    async def answer(self, request: Request) -> Reply:
        """Return the page of a path."""
        # Ids in the query and not in the path: callers choose them, and ".." or "a/b" would lead elsewhere.
        wanted = request.query.get("id", "")
        match request.path:
            case "/":
                return await self._front(is_live="live" in request.query)
            case "/request":
                return self._request(wanted)
            case "/api/requests":
                return _json([_brief(journey) for journey in self._newest()])
            case "/api/request":
                journey = self._find(wanted)
                return _json(asdict(journey)) if journey is not None else _json(self._unknown(wanted), is_found=False)
            case "/healthz":
                return _json({"ready": True, "stage": "ready", **self._figures()})
        return plain(
            HTTPStatus.NOT_FOUND, "there are / and /request?id=, and as JSON /api/requests and /api/request?id="
        )

    async def _front(self, *, is_live: bool) -> Reply:
        journeys = self._newest()
        view = await self._watch.look()
        live_seconds = LIVE_SECONDS if is_live else 0
        return _page(pages.front(view, journeys, self._figures(), live_seconds=live_seconds))

    def _request(self, wanted: str) -> Reply:
        journey = self._find(wanted)
        if journey is None:
            return _page(pages.missing(self._unknown(wanted)["error"]), HTTPStatus.NOT_FOUND)
        return _page(pages.request(journey))

    def _newest(self) -> list[Journey]:
        return newest(self._store.newest(), ON_PAGE, now=time.time())

    def _find(self, wanted: str) -> Journey | None:
        return find(self._store.newest(), wanted, now=time.time())

    def _figures(self) -> dict[str, int]:
        return asdict(self._counts) | {
            "num_traces": len(self._store),
            "num_bytes": self._store.num_bytes,
            "num_evicted_traces": self._store.num_evicted,
            "num_overflowing_spans": self._store.num_overflowing,
        }

    def _unknown(self, wanted: str) -> dict[str, str]:
        if not len(self._store):
            return {"error": "no request was recorded yet: ask something first"}
        num_kept = min(len(self._store), MAX_TRACES)
        if len(wanted) < SHORTEST_PREFIX:
            return {
                "error": f"no request {wanted!r}; the begin of an id is at least {SHORTEST_PREFIX} of its characters"
            }
        return {
            "error": f"no request {wanted!r} among the newest {num_kept} recorded since this suite started; "
            "it is there half a second after its end, unless its traceparent said no it was refused "
            "before it had one, or very many came at once"
        }


def _brief(journey: Journey) -> dict[str, Any]:
    return {name: value for name, value in asdict(journey).items() if name not in {"rows", "path"}}


def _json(value: object, *, is_found: bool = True) -> Reply:
    return Reply(HTTPStatus.OK if is_found else HTTPStatus.NOT_FOUND, JSON, json.dumps(value).encode() + b"\n")


def _page(html: str, status: HTTPStatus = HTTPStatus.OK) -> Reply:
    return Reply(status, HTML, html.encode(), pages.POLICY)
