"""What runs here, and how is it doing?"""

from collections.abc import Sequence

import psutil
from rich.table import Table

from services.local.health import Health
from services.local.sizes import in_words


def status_table(health: Sequence[Health]) -> Table:
    """Return one row per process."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("service", "replica", "pid", "address", "ready", "rss", "restarts"):
        table.add_column(column, justify="right" if column in {"pid", "rss", "restarts"} else "left", no_wrap=True)
    for one in health:
        process = one.process
        table.add_row(
            process.service,
            process.name,
            str(process.identity.pid) if process.identity else "-",
            process.address,
            "[green]yes[/]" if one.ready else f"[red]no[/] ({one.stage})",
            resident(one),
            str(process.restarts),
        )
    return table


def resident(health: Health) -> str:
    """Return the process's resident memory in words; "-" when it has none."""
    live = health.process.identity.process() if health.process.identity else None
    try:
        return in_words(live.memory_info().rss) if live else "-"
    except psutil.NoSuchProcess:
        return "-"
