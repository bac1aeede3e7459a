"""What commands print while and after they work: progress bars on stderr, tables on stdout."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from meshinfer.cli.words import size
from meshinfer.files.progress import Progress

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.progress import TaskID

LABELS = {
    "download": "downloading",
    "hash": "hashing",
    "convert": "converting to OpenVINO",
    "cut": "cutting into shards",
    "verify": "verifying against the unsplit model",
    "load": "compiling",
    "measure": "measuring",
}
_UNBROKEN = 10_000
"""Characters of a line that nobody looks at in a terminal."""
_BYTES = {"download", "hash"}


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A `Progress` that draws one bar per phase on a terminal, and prints one line per phase elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        said: set[str] = set()

        def line(phase: str, done: int, total: int) -> None:
            if phase not in said:
                said.add(phase)
                console.print(LABELS.get(phase, phase), highlight=False)

        yield line
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    current: tuple[str, TaskID] | None = None
    with Bars(*columns, console=console) as bars:

        def finish() -> None:
            for task in bars.tasks:
                if not task.finished:
                    bars.update(task.id, total=task.total or 1, completed=task.total or 1)

        def draw(phase: str, done: int, total: int) -> None:
            nonlocal current
            if current is None or current[0] != phase:
                finish()
                current = phase, bars.add_task(LABELS.get(phase, phase), total=None, amount="")
            bars.update(current[1], total=total or None, completed=done, amount=_amount(phase, done, total))

        yield draw
        finish()


@contextmanager
def spinner(label: str) -> Iterator[Callable[[str], None]]:
    """Something that turns on a terminal's stderr while work is done, and is gone afterwards.

    What it yields says what is being done now; not on a terminal that is a line when it is something else.
    """
    from rich.console import Console
    from rich.text import Text

    def one_line(doing: str) -> Text:
        return Text(doing, no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
    if not console.is_terminal:
        said = ""

        def line(doing: str) -> None:
            nonlocal said
            words = re.sub(r"\d+", "", doing)
            if words != said:
                said = words
                click.echo(doing, err=True)

        yield line
        return
    with console.status(one_line(label)) as status:
        yield lambda doing: status.update(one_line(doing))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print a table; the columns in `right` are numbers.

    On a terminal that is too narrow the last column is folded. Elsewhere no line is broken.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        justify: JustifyMethod = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != headings[-1], overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=_UNBROKEN)
    console.print(table)


def _amount(phase: str, done: int, total: int) -> str:
    if not total:
        return ""
    if phase in _BYTES:
        return f"{size(done)} of {size(total)}"
    return f"{done}/{total}"
