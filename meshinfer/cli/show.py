"""What commands print while and after they work: progress bars on stderr, tables on stdout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshinfer.shards.progress import Progress

if TYPE_CHECKING:
    from rich.progress import TaskID

_LABELS = {
    "download": "downloading",
    "hash": "hashing",
    "convert": "converting to OpenVINO",
    "cut": "cutting into shards",
    "verify": "verifying against the unsplit model",
    "load": "compiling",
    "measure": "measuring",
}
_BYTES = {"download", "hash"}


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A `Progress` that draws one bar per phase on a terminal, and prints one line per phase elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    seen: dict[str, TaskID] = {}
    if not console.is_terminal:

        def line(phase: str, done: int, total: int) -> None:
            if phase not in seen:
                seen[phase] = 0  # type: ignore[assignment]
                console.print(_LABELS.get(phase, phase), highlight=False)

        yield line
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:

        def draw(phase: str, done: int, total: int) -> None:
            if phase not in seen:
                for task in seen.values():
                    bars.update(task, total=1, completed=1)
                seen[phase] = bars.add_task(_LABELS.get(phase, phase), total=None, amount="")
            bars.update(seen[phase], total=total or None, completed=done, amount=_amount(phase, done, total))

        yield draw
        for task in seen.values():
            bars.update(task, total=1, completed=1)


def _amount(phase: str, done: int, total: int) -> str:
    if not total:
        return ""
    if phase in _BYTES:
        return f"{size(done)} of {size(total)}"
    return f"{done}/{total}"


def size(count: int) -> str:
    """A number of bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
