"""What does `fathom trace` ask the console, and what does a person read?"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from pydantic import TypeAdapter

from services.local import state
from services.local.console.journey import Journey
from services.local.console.requests import CLOSING_SECONDS
from services.local.home import Home
from services.local.starting import reason_to_wait
from services.local.state import SuiteState
from services.local.trace_text import journey_lines, list_lines

NO_CONSOLE = "this suite runs without its console: start it again without --no-console"
ASK_SECONDS = 5.0
ON_THE_WAY_SECONDS = 0.7
"""The services send their spans every half second: what has just ended is still on its way."""
ASK_AGAIN_SECONDS = 0.2
LEAST_COLUMNS = 80
"""Drawn into less, a line would break where the terminal's edge is; a pipe tells no width, and gets this one."""
_ONE, _MANY = TypeAdapter(Journey), TypeAdapter(list[Journey])


def trace(
    request: Annotated[
        str,
        typer.Argument(
            help='A request id (x-request-id, or its first 6 letters or more), or "last"; the newest 20 when left out.'
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - typer makes flags of these
) -> None:
    """Draw a request's way through the services, or list the newest requests."""
    home = Home.of(Path.cwd())
    suite = state.read(home.state)
    if suite is None or not suite.is_running:
        _fail(reason_to_wait(home))
    if not _is_text(request):
        _fail(f"no request {request!r} (the newest ones: fathom trace)")
    time.sleep(ON_THE_WAY_SECONDS)
    answer = _whole(suite, request) if request else _ask(suite, "/api/requests", {})
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    columns = max(LEAST_COLUMNS, shutil.get_terminal_size(fallback=(LEAST_COLUMNS, 24)).columns)
    if request:
        lines = journey_lines(_ONE.validate_python(answer), columns=columns)
    else:
        # A program that reads the list wants the ids whole.
        lines = list_lines(_MANY.validate_python(answer), columns=columns if sys.stdout.isatty() else None)
    print("\n".join(lines))


def _whole(suite: SuiteState, request: str) -> Any:
    """Return a request's journey as JSON; one that lacks the recipe's word alone is asked for until that has come.

    Where the console was away, each service finds it again by its own clock, and the outermost span can be the last.
    """
    deadline = time.monotonic() + CLOSING_SECONDS
    while (answer := _ask(suite, "/api/request", {"id": request}))["is_closing"] and time.monotonic() < deadline:
        time.sleep(ASK_AGAIN_SECONDS)
    return answer


def _is_text(word: str) -> bool:
    """Return whether a word of the command line is one: its bytes may be no UTF-8, and then no URL can hold it."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ask(suite: SuiteState, path: str, query: dict[str, str]) -> Any:
    """Return the console's JSON."""
    if not suite.console_url:
        _fail(NO_CONSOLE)
    try:
        # No proxy from the environment: it could not reach a process on this machine.
        with httpx.Client(base_url=suite.console_url, timeout=ASK_SECONDS, trust_env=False) as client:
            reply = client.get(path, params=query)
    except httpx.HTTPError:
        _fail(
            f"the console does not answer at {suite.console_url}: try again in a few seconds (see: fathom logs console)"
        )
    answer = reply.json()
    if reply.is_error:
        _fail(f"{answer['error']} (the newest ones: fathom trace)")
    return answer


def _fail(reason: str) -> NoReturn:
    print(f"fathom: {reason}", file=sys.stderr)
    raise typer.Exit(1)
