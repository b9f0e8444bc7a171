"""On whose behalf does the running task work, and what must be known or counted for them?

The gate opens a visit for every HTTP request; what the request causes, background work too, finds it by
`current_visit`. While keys are off, and where nobody asked, everything is the anonymous tenant's.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Final

from proto.common_pb2 import Request, RetentionClass
from services.recipe.choices import Choice, spent
from services.recipe.jobs import Job
from services.recipe.keys_account import Account, LimitReachedError
from services.recipe.refusals import ApiError
from services.recipe.usage_log import UsageLog

_CLASSES: Final = {
    "chat": RetentionClass.RETENTION_CLASS_CHAT,
    "agent": RetentionClass.RETENTION_CLASS_AGENT,
}


class Visit:
    """One request's authenticated caller. account: None while keys are off; retention: of keys.RETENTIONS."""

    def __init__(self, account: Account | None = None, retention: str = "chat", log: UsageLog | None = None) -> None:
        self.account = account
        self._log = log
        self._num_inside = 0
        self.retention = retention
        self.tenant = account.key.tenant if account else ""
        self.key_id = account.key.id if account else ""

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use the model, and know of it."""
        return self.account is None or self.account.key.may_use(model)

    def check_model(self, model: str) -> None:
        """Raise a 403 for a model that the caller's key is not for."""
        if not self.may_use(model):
            self._count_refusal("model")
            raise ApiError(HTTPStatus.FORBIDDEN, "this API key is not for that model", param="model")

    def begin(self, jobs: Sequence[Job]) -> None:
        """Write the caller into the requests, and take their prompts' tokens: a prompt counts once.

        Raises a 403 or a 429 before any of them was sent.
        """
        for job in jobs:
            self.check_model(job.request.model)
            self._sign(job.request)
        if self.account is not None:
            lengths = {job.prompt: len(job.prompt_ids) for job in jobs}
            try:
                self.account.take_input(sum(lengths.values()), time.monotonic())
            except LimitReachedError as error:
                self._count_refusal(error.kind)
                raise

    def spend_output(self, num_tokens: int) -> None:
        """Count tokens of the answer as they come."""
        if self.account is not None:
            self.account.spend("output_tokens", num_tokens, time.monotonic())

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count the visit as one request under way, from the first time inside to the last time out."""
        if self.account is not None and self._num_inside == 0:
            self.account.num_running += 1
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if self.account is not None and self._num_inside == 0:
                self.account.num_running -= 1

    @contextmanager
    def recorded(self, choices: Sequence[Choice], operation: str) -> Iterator[None]:
        """Generate the choices inside; however that ends, a usage record is written."""
        outcome = "failed"
        try:
            with self.under_way():
                yield
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            if self._log is not None:
                self._log.record(
                    tenant=self.tenant,
                    key=self.key_id,
                    retention=self.retention,
                    operation=operation,
                    model=choices[0].job.request.model,
                    outcome=outcome,
                    use=spent(choices),
                )

    def _count_refusal(self, reason: str) -> None:
        if self._log is not None:
            self._log.refused(reason, tenant=self.tenant, key=self.key_id)

    def _sign(self, request: Request) -> None:
        # Only ever from the key: the entrypoint makes the salt of the stored KV's names of it.
        request.tenant = self.tenant
        request.priority = self.account.key.priority if self.account else 0
        request.retention = _CLASSES[self.retention]


_ANONYMOUS = Visit()
VISIT: ContextVar[Visit] = ContextVar("visit", default=_ANONYMOUS)


def current_visit() -> Visit:
    """Return the visit that the running task belongs to."""
    return VISIT.get()
