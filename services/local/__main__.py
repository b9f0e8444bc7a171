"""Start the console command."""

from services.local.commands import app


def main() -> None:
    """Run `fathom`."""
    app(prog_name="fathom")


if __name__ == "__main__":
    main()
