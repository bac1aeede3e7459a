"""What `meshinfer up` shows: a live panel on a terminal, log lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from meshinfer.cli.show import plural, size

if TYPE_CHECKING:
    from rich.console import RenderableType

QUIET = ("aiohttp", "zeroconf", "asyncio", "httpx", "filelock")
REFRESH_S = 0.5
LINE = "%(asctime)s %(levelname)-7s %(message)s"


def log_lines(level: int) -> None:
    """One line for each thing that happens, on stderr."""
    logging.basicConfig(level=level, format=LINE, stream=sys.stderr)
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
    for heading in ("node", "device", "memory", "layers", "doing"):
        table.add_column(heading)
    for node in status["nodes"]:
        table.add_row(*node_cells(node), style="bold" if node["self"] else "")
    head = Text()
    head.append(status["model"] or "no model", style="bold")
    if status["ready"]:
        head.append("  ready", style="green")
        if plan := status["plan"]:
            predicted = f"{plan['tokens_per_s']:.1f} tokens/s for one user"
            head.append(f"  {predicted}, {plan['tokens_per_s_together']:.1f} for {plan['users']} (predicted)")
    else:
        head.append(f"  {status['stage']}", style="yellow")
    lines: list[RenderableType] = [head, table]
    foot = f"API {status['api']}/v1   requests here: {status['requests']}, answered: {status['answered']}"
    lines.append(Text(foot, style="dim"))
    lines.append(Text(f"another machine joins with: meshinfer up --join {status['join_code']}", style="dim"))
    return Panel(Group(*lines), title=f"meshinfer {status['version']} on {status['name']}", title_align="left")


def node_cells(node: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """A node in words: name, device, memory, layers, what it is doing."""
    layers = f"{node['first']}-{node['last']}" if node["first"] is not None else "-"
    doing = node["phase"]
    if node["total_bytes"]:
        doing += f" {size(node['done_bytes'])} of {size(node['total_bytes'])}"
    elif node["requests"]:
        doing += f", {plural(node['requests'], 'request')}"
    return node["name"], node["device"], size(node["memory_bytes"]), layers, doing
