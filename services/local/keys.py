"""How are API keys made, listed and revoked? `fathom keys`: it edits the key file that recipes read."""

import fcntl
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn, get_args

import typer
from rich.console import Console
from rich.table import Column, Table

from services.local.home import Home
from services.recipe.keys import ApiKey, KeyFile, KeysFileError, Retention, new_key, parse_keys

app = typer.Typer(help="Make, list and revoke API keys (docs/operations.md).", no_args_is_help=True)

File = Annotated[Path | None, typer.Option("--file", help="The key file; .fathom/keys.json when left out.")]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="No limit when left out.", rich_help_panel="Limits")
]


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose key it is: keys of one tenant share stored KV and responses.")],
    file: File = None,
    model: Annotated[list[str] | None, typer.Option(help="A model it may use; all when left out.")] = None,
    requests_per_minute: Limit = None,
    input_tokens_per_minute: Limit = None,
    output_tokens_per_minute: Limit = None,
    max_concurrency: Limit = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, metavar="N", help="Higher is served first.")] = 0,
    retention: Annotated[Retention, typer.Option(help="How long its KV is worth keeping.")] = "chat",
    any_retention: Annotated[  # noqa: FBT002 - typer makes flags of these
        bool, typer.Option("--any-retention", help="Let requests choose another one by x-fathom-retention.")
    ] = False,
) -> None:
    """Make a key and print it, as the last line and this once: only its hash is kept."""
    key_id, whole, secret_sha256 = new_key()
    try:
        made = ApiKey(
            id=key_id,
            secret_sha256=secret_sha256,
            tenant=tenant,
            models=tuple(model or ()),
            requests_per_minute=requests_per_minute,
            input_tokens_per_minute=input_tokens_per_minute,
            output_tokens_per_minute=output_tokens_per_minute,
            max_concurrency=max_concurrency,
            priority=priority,
            retention=retention,
            allowed_retentions=get_args(Retention) if any_retention else (),
        )
    except ValueError:  # pydantic's; all else was checked by the options
        _fail(f"{tenant!r} is no tenant: 1 to 64 letters, digits, dots, dashes and underscores")
    path = _path(file)
    with _locked(path):
        _write(path, KeyFile(keys=(*_read(path, must_exist=False).keys, made)))
    print(f"added {key_id} to {path}", file=sys.stderr)
    print(f"used with: fathom up --set recipe.keys_file={shlex.quote(str(path))}", file=sys.stderr)
    print(whole)


@app.command("list")
def list_keys(file: File = None) -> None:
    """Show every key's id, tenant and limits."""
    # Piped output is not wrapped to a terminal's width that it does not have.
    Console(width=None if sys.stdout.isatty() else 160).print(_table(_read(_path(file)).keys))


def _table(keys: Sequence[ApiKey]) -> Table:
    table = Table(Column("id", no_wrap=True))  # whole, for `revoke` wants it; the others take more lines
    for name in ("tenant", "models", "requests/min", "input/min", "output/min", "at once", "priority", "retention"):
        table.add_column(name, overflow="fold")
    for key in keys:
        limits = (
            key.requests_per_minute,
            key.input_tokens_per_minute,
            key.output_tokens_per_minute,
            key.max_concurrency,
        )
        kept = " ".join(dict.fromkeys((key.retention, *key.allowed_retentions)))
        shown = ("-" if limit is None else str(limit) for limit in limits)
        table.add_row(key.id, key.tenant, " ".join(key.models) or "all", *shown, str(key.priority), kept)
    return table


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id of a key, or the whole key.")], file: File = None
) -> None:
    """Take a key out of the file; recipes refuse it within a second, answers under way go on."""
    wanted = key_id.removeprefix("sk-").partition("_")[0]
    path = _path(file)
    with _locked(path):
        keys = _read(path).keys
        left = tuple(key for key in keys if key.id != wanted)
        if len(left) == len(keys):
            _fail(f"there is no key {wanted!r} in {path}")
        _write(path, KeyFile(keys=left))
    print(f"revoked {wanted}")


def _path(file: Path | None) -> Path:
    # Resolved: where the name is a link, the file behind it is replaced and not the link.
    return (file or Home.of(Path.cwd()).root / "keys.json").resolve()


def _read(path: Path, *, must_exist: bool = True) -> KeyFile:
    try:
        return parse_keys(path.read_bytes())
    except FileNotFoundError:
        if must_exist:
            _fail(f"there is no {path}; fathom keys new makes it")
        return KeyFile(keys=())
    except OSError as exc:
        _fail(f"{path} cannot be read: {exc.strerror}")
    except KeysFileError as exc:
        _fail(f"{path}: {exc}")


def _write(path: Path, keys: KeyFile) -> None:
    """Replace the file at once: a recipe reads the old keys or the new ones, never half of them."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            os.fchmod(out.fileno(), mode)
            out.write(keys.model_dump_json(indent=2, exclude_defaults=True) + "\n")
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep a second `fathom keys` from losing what this one writes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        _fail(f"{path.parent} cannot be written: {exc.strerror}")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fail(reason: str) -> NoReturn:
    print(f"fathom: {reason}", file=sys.stderr)
    raise typer.Exit(1)
