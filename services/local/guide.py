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
Object store behind the KV store, file:///FOLDER or s3://BUCKET/PREFIX: every replica finds every block there; \
credentials below."""

OTLP_HELP = "A collector that the console passes all spans on to, for example http://127.0.0.1:4317."
CONSOLE_HELP = (
    "Collect spans, for fathom trace and a page that shows them; without it they go to --otlp-endpoint alone."
)
SPANS_PANEL = "Options for spans"
"""A panel of its own: the other one is too narrow beside the column that --no-console needs."""

UP_EPILOG = """\
[bold]Examples[/]
  fathom up --detach
  fathom up --model FOLDER --dtype int8 --port 8001
  fathom up --kv-bytes 500M --set prefill.chunk_tokens=128
  fathom up --kv-url s3://BUCKET/PREFIX \\
    --set kvstore.object_store_options_file=FILE

[bold]Exit status[/]
  0    with --detach: it is ready; else: it was ready, and was stopped
  1    it did not start, or its supervisor failed later; stderr says why
  2    an unknown option, or a value that it does not take
  130  stopped before it was ready: by Ctrl-C, by SIGTERM, by fathom down
The other commands' are in docs/operations.md."""

IN_ORDER = ("up", "chat", "status", "logs", "trace", "down", "pull", "kv", "keys", "tiny-model")
"""As a newcomer needs them."""


class Ordered(TyperGroup):
    """Lists its commands in that order, groups of commands among them; others, if there are, behind."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=(*IN_ORDER, *self.commands).index)
