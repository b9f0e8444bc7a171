"""Which commands does `fathom` have, and what does a person read when one goes wrong?"""

import asyncio
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from services.local import state
from services.local.down import end
from services.local.health import ask_all
from services.local.home import Home
from services.local.logs import NoSuchLog, follow
from services.local.plan import Dtype, Options, check_settings
from services.local.progress import Display, display
from services.local.status import status_table
from services.local.talk import Unanswered
from services.local.talk import chat as stream_chat
from services.local.up import NotStarted
from services.local.up import up as start_suite

# A paragraph is one line: rich wraps it to the terminal, and keeps every other line break.
GUIDE = """\
Run a complete language-model service on this machine.

[bold]fathom up[/] starts it here and stays; Ctrl-C stops it. In another terminal, in the same directory, ask it \
something: [bold]fathom chat "Count from one to ten."[/] Any OpenAI client works too, with base URL \
http://127.0.0.1:8000/v1.

[bold]fathom up --detach[/] returns once the first answer came; then [bold]fathom status[/] shows the processes, \
[bold]fathom logs[/] follows what they write, and [bold]fathom down[/] stops them.

All state lives in ./.fathom: the model, the stored KV, the logs. Delete that folder to start afresh."""

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
NOTHING_RUNS = "nothing is running here: run fathom up"

app = typer.Typer(
    help=GUIDE, no_args_is_help=True, rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False
)


def size(text: str) -> int:
    """Return bytes for "500M", "8G", "8GiB" or a plain number (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 500M or 8G")
    return int(float(match[1]) * UNITS[match[2].upper()])


def setting(text: str) -> tuple[str, str, str]:
    """Return (service, field, value) for "prefill.chunk_tokens=128"."""
    match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not SERVICE.SETTING=VALUE, for example prefill.chunk_tokens=128")
    return match[1], match[2].lower(), match[3]


@app.command()
def up(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model; the default one is downloaded when needed.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Numbers the weights are kept in.")] = "bf16",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill replicas.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode replicas.")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the HTTP API; all others are free ones.")] = 8000,
    detach: Annotated[  # noqa: FBT002 - typer makes flags of these
        bool, typer.Option("--detach", help="Return once the first token came; stop with fathom down.")
    ] = False,
    kv_bytes: Annotated[str, typer.Option(help="Most disk the KV store may take, for example 500M.")] = "8G",
    otlp_endpoint: Annotated[str, typer.Option(help="Where spans go, for example http://127.0.0.1:4317.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SERVICE.SETTING=VALUE", help="A further setting of one service."),
    ] = None,
) -> None:
    """Start NATS and all eight services; say when the first real token came."""
    home = Home.of(Path.cwd())
    show = display()
    options = Options(
        model=_model_folder(model, home, show),
        dtype=dtype,
        num_prefill=prefill,
        num_decode=decode,
        port=port,
        kv_bytes=size(kv_bytes),
        otlp_endpoint=otlp_endpoint,
        settings=tuple(setting(text) for text in settings or ()),
    )
    try:
        check_settings(options)
        status = start_suite(home, options, show, detach=detach)
    except (NotStarted, ValueError) as reason:
        _fail(str(reason))
    raise typer.Exit(status)


@app.command()
def down() -> None:
    """Stop what fathom up started here; return when every process has ended."""
    home = Home.of(Path.cwd())
    num_ended = end(home)
    print(f"stopped {num_ended} processes" if num_ended else "nothing was running here")


@app.command()
def status() -> None:
    """Show every process; exit status 0 when all are ready."""
    suite = _running_suite()
    health = asyncio.run(ask_all(suite))
    # Piped output is not wrapped to a terminal's width that it does not have.
    Console(width=None if sys.stdout.isatty() else 160).print(status_table(health))
    print(f"\n{suite.url}  model {suite.model}")
    raise typer.Exit(0 if all(one.ready for one in health) else 1)


@app.command()
def logs(
    service: Annotated[
        str | None, typer.Argument(help="A service (decode) or a replica (decode-0); all when left out.")
    ] = None,
    follow_on: Annotated[  # noqa: FBT002 - typer makes flags of these
        bool, typer.Option("--follow/--no-follow", help="Go on with what is written from now on.")
    ] = True,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log to begin with.")] = 200,
) -> None:
    """Print the services' logs by time, and follow them."""
    try:
        for line in follow(Home.of(Path.cwd()), service, num_lines=lines, forever=follow_on):
            print(line, flush=True)
    except NoSuchLog as reason:
        _fail(str(reason))
    except (KeyboardInterrupt, BrokenPipeError):
        raise typer.Exit(0) from None


@app.command()
def chat(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    url: Annotated[str, typer.Option(help="Another suite's address; this directory's when left out.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = 0.0,
) -> None:
    """Ask a question and stream the answer, then one line on what it cost."""
    target = url.rstrip("/") or _running_suite().url
    try:
        answer = stream_chat(
            target,
            question,
            max_tokens=max_tokens,
            temperature=temperature,
            show=lambda text: print(text, end="", flush=True),
        )
    except Unanswered as reason:
        _fail(str(reason))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    print(f"\n{answer.summary()}")


@app.command()
def pull() -> None:
    """Download and convert the default model; print its folder as the last line."""
    home = Home.of(Path.cwd())
    print(_model_folder(None, home, display()))


def _model_folder(chosen: Path | None, home: Home, show: Display) -> Path:
    if chosen is not None:
        if not (chosen / "config.json").is_file():
            _fail(f"{chosen} is no model folder: it has no config.json")
        return chosen.resolve()
    from services.local.pull import PullFailed  # reads weights with numpy, which no other command needs
    from services.local.pull import pull as pull_model

    try:
        with show:
            return pull_model(home.models, show.install)
    except PullFailed as reason:
        _fail(str(reason))


def _running_suite() -> state.SuiteState:
    suite = state.read(Home.of(Path.cwd()).state)
    if suite is None or not suite.is_running:
        _fail(NOTHING_RUNS)
    return suite


def _fail(reason: str) -> NoReturn:
    print(f"fathom: {reason}", file=sys.stderr)
    raise typer.Exit(1)
