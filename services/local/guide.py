"""What does `fathom --help` say, and in which order?"""

from typing import Any

from typer.core import TyperGroup

# A paragraph is one line: rich wraps it to the terminal, and keeps every other line break.
GUIDE = """\
Run a complete language-model service on this machine.

[bold]fathom up[/] starts it here and stays; Ctrl-C stops it. In another terminal, in the same directory, ask it \
something: [bold]fathom chat "Count from one to ten."[/] Any OpenAI client works too, with base URL \
http://127.0.0.1:8000/v1.

[bold]fathom up --detach[/] returns once the first answer came; then [bold]fathom status[/] shows the processes, \
[bold]fathom logs[/] follows what they write, [bold]fathom trace last[/] draws a request's way through them, and \
[bold]fathom down[/] stops them.

All state lives in ./.fathom: the model, the stored KV, the logs. Delete that folder to start afresh."""

DTYPE_HELP = """\
How weights and arithmetic are kept: bf16 for everyday use; fp32 as the exact reference, slower; int8 (weights only) \
fastest for a single user."""

REPLAY_HELP = "How a model with sliding windows goes on after a prefix hit (docs/deepseek_v41.md)."

KV_URL_HELP = """\
Object store behind the KV store, file:///FOLDER or s3://BUCKET/PREFIX: every replica finds every block there. \
Credentials: --set kvstore.object_store_options_file=FILE."""

OTLP_HELP = "A collector that the console passes all spans on to, for example http://127.0.0.1:4317."
CONSOLE_HELP = (
    "Collect spans, for fathom trace and a page that shows them; without it they go to --otlp-endpoint alone."
)

IN_ORDER = ("up", "chat", "status", "logs", "trace", "down", "pull", "kv", "keys", "tiny-model")
"""As a newcomer needs them."""


class Ordered(TyperGroup):
    """Lists its commands in that order, groups of commands among them; others, if there are, behind."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=(*IN_ORDER, *self.commands).index)
