"""What `meshinfer up` shows: a live panel on a terminal, log lines elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from meshinfer.cli.tables import NODES, measured, node_rows, predicted
from meshinfer.cli.words import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

QUIET = ("aiohttp", "zeroconf", "asyncio", "httpx", "filelock")
REFRESH_S = 0.5


class KeyValues(logging.Formatter):
    """Log lines as `key=value` pairs, which people read as well as programs."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        part = record.name.removeprefix("meshinfer.")
        line = f"time={at}.{int(record.msecs):03d}Z level={record.levelname.lower()} part={part} "
        line += f"event={json.dumps(record.getMessage(), ensure_ascii=False)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def log_lines(level: int) -> None:
    """One line for each thing that happens, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValues())
    logging.basicConfig(level=level, handlers=[handler])
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def panel() -> Callable[[Callable[[], dict[str, Any]]], Coroutine[Any, Any, None]]:
    """Something that draws the status until it is cancelled; log lines go above it."""
    from rich.console import Console
    from rich.live import Live
    from rich.logging import RichHandler

    console = Console(stderr=True)
    handler = RichHandler(console=console, show_path=False, rich_tracebacks=False, markup=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", datefmt="[%X]", handlers=[handler])
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)

    async def show(status: Callable[[], dict[str, Any]]) -> None:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(drawn(status()), refresh=True)
                await asyncio.sleep(REFRESH_S)

    return show


def drawn(status: dict[str, Any]) -> RenderableType:
    """The panel for a status."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in NODES:
        table.add_column(heading, justify="right" if heading == "memory" else "left")
    for cells in node_rows(status):
        table.add_row(*map(Text, cells))
    head = Text(status["model"] or "no model", style="bold")
    head.append(f"  {status['stage']}", style="not bold green" if status["ready"] else "not bold yellow")
    lines: list[RenderableType] = [head]
    if status["trouble"] and status["trouble"] != status["stage"]:
        lines.append(Text(f"trouble: {status['trouble']}", style="red"))
    if plan := status["plan"]:
        lines.append(Text(f"predicted: {predicted(plan)}"))
    if timing := status["timing"]:
        lines.append(Text(f"measured: {measured(timing)}"))
    lines += ["", table, ""]
    if not status["peers"]:
        lines.append(Text("alone so far: meshinfer peers says why", style="yellow"))
    requests = f"{plural(status['requests'], 'request')} open, {status['answered']} answered"
    lines.append(Text(f"API {status['api']}/v1, {requests}", style="dim"))
    lines.append(Text(f"to join: meshinfer up --join {status['join_code']}", style="dim"))
    title = Text(f"meshinfer {status['version']} on {status['name']}")
    return Panel(Group(*lines), title=title, title_align="left", padding=(0, 1))
