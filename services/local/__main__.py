"""Start the console command."""

from services.local import kv
from services.local.commands import app


def main() -> None:
    """Run `fathom`."""
    app.add_typer(kv.app, name="kv")
    app(prog_name="fathom")


if __name__ == "__main__":
    main()
