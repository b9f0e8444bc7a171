"""May this caller come in? Asked of every HTTP request before anything of its body is read."""

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.chassis import telemetry
from services.recipe.keys import RETENTIONS, Keyring
from services.recipe.keys_account import Account, LimitReachedError, Standing
from services.recipe.keys_visit import VISIT, Visit
from services.recipe.refusals import ApiError, refuse
from services.recipe.shapes import ANTHROPIC, shape_of
from services.recipe.stream import send_whole
from services.recipe.usage_log import UsageLog

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""What needs no key: probes, and pages that are the same for everybody."""
RETENTION_HEADER = b"x-fathom-retention"


class Gate:
    """ASGI middleware: finds the key, opens the visit, refuses with 401, 403 or 429, and tells where limits stand.

    keyring: returns the keys that hold now; None while keys are off.
    """

    def __init__(self, app: ASGIApp, keyring: Callable[[], Keyring] | None, metrics: CollectorRegistry) -> None:
        self._app = app
        self._keyring = keyring
        self._log = UsageLog(metrics)
        self._accounts: dict[str, Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through on its caller's behalf, or answer with the refusal."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            account = self._identify(scope)
            send = _telling(scope, account, send) if account else send
            visit = self._admit(scope, account)
        except ApiError as error:
            await _refuse(scope, error, send)
            return
        scope["fathom.tenant"] = visit.tenant
        token = VISIT.set(visit)
        try:
            with visit.under_way():
                await self._app(scope, receive, send)
        finally:
            VISIT.reset(token)

    def _identify(self, scope: Scope) -> Account | None:
        """Return the account of the request's key, None while keys are off; raise a 401."""
        if self._keyring is None:
            return None
        presented, keyring = _presented(scope), self._keyring()
        key = next((key for text in presented if (key := keyring.find(text)) is not None), None)
        if key is None:
            self._log.refused("key")
            raise _UnknownKeyError(is_given=bool(presented))
        account = self._accounts.get(key.id)
        if account is None:
            # No more accounts than keys: those that were revoked go when a new one comes.
            self._accounts = {id_: kept for id_, kept in self._accounts.items() if keyring.get(id_) is not None}
            account = self._accounts[key.id] = Account(key)
        account.renew(key, time.monotonic())
        return account

    def _admit(self, scope: Scope, account: Account | None) -> Visit:
        """Return the request's visit; raise a 400, a 403 or a 429."""
        asked = _header(scope, RETENTION_HEADER)
        name = RETENTION_HEADER.decode()
        if asked and asked not in RETENTIONS:
            raise refuse(name, f"must be one of {', '.join(RETENTIONS)}")
        if account is None:
            return Visit(None, asked or "chat", self._log)
        key = account.key
        if asked and not key.may_keep(asked):
            self._log.refused("retention", tenant=key.tenant, key=key.id)
            raise ApiError(HTTPStatus.FORBIDDEN, f"{name}: this API key may not ask for {asked}", param=name)
        try:
            account.begin(time.monotonic())
        except LimitReachedError as error:
            self._log.refused(error.kind, tenant=key.tenant, key=key.id)
            raise
        return Visit(account, asked or key.retention, self._log)


async def _refuse(scope: Scope, error: ApiError, send: Send) -> None:
    shape, shown_id = shape_of(scope), str(scope["fathom.shown_id"])
    telemetry.log.info("recipe.request.refused", shown_id=shown_id, status=int(error.status))
    await send_whole(send, shape.status(error), shape.body(error, shown_id), error.headers())


class _UnknownKeyError(ApiError):
    """A 401."""

    def __init__(self, *, is_given: bool) -> None:
        wrong = "this API key is not known here, or no more"
        none = "an API key is needed: send it as Authorization: Bearer sk-..., or as x-api-key"
        super().__init__(HTTPStatus.UNAUTHORIZED, wrong if is_given else none)

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"www-authenticate", b"Bearer")]


def _presented(scope: Scope) -> list[str]:
    """Return the keys in the headers; official clients with two settings send two, of which one must be right."""
    scheme, _, token = _header(scope, b"authorization").partition(" ")
    bearer = token if scheme.lower() == "bearer" else ""
    return [text for text in (_header(scope, b"x-api-key"), bearer.strip()) if text]


def _header(scope: Scope, name: bytes) -> str:
    """Return a header's first value, "" when there is none."""
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found.decode("latin-1").strip()


def _telling(scope: Scope, account: Account, send: Send) -> Send:
    anthropic = shape_of(scope) is ANTHROPIC

    def send_with_standings(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            extra = standing_headers(account.standings(time.monotonic()), anthropic=anthropic)
            message["headers"] = [*message.get("headers", ()), *extra]
        return send(message)

    return send_with_standings


def standing_headers(standings: Sequence[Standing], *, anthropic: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers that say where limits stand, in the protocol's own words.

    Of input and output tokens, the limit with the smaller share left is also told as plain "tokens", for clients that
    know of one token limit only.
    """
    tokens = [standing for standing in standings if standing.kind != "requests"]
    named = [(standing.kind.replace("_", "-"), standing) for standing in standings]
    if tokens:
        named.append(("tokens", min(tokens, key=lambda standing: standing.remaining / standing.limit)))
    told = []
    for name, standing in named:
        reset = _moment(standing.reset_seconds) if anthropic else f"{standing.reset_seconds:.3f}s"
        for part, value in (("limit", standing.limit), ("remaining", standing.remaining), ("reset", reset)):
            full = f"anthropic-ratelimit-{name}-{part}" if anthropic else f"x-ratelimit-{part}-{name}"
            told.append((full.encode(), str(value).encode()))
    return told


def _moment(seconds: float) -> str:
    then = datetime.now(UTC) + timedelta(seconds=seconds)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")
