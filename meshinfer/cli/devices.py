"""`meshinfer devices`: what this machine can compute with, and why something is missing."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from meshinfer.engine.devices import Absence, Device, absent, probe


@click.command("devices")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Show what this machine can compute with, and why something was not found."""
    found, missing = probe(), absent()
    if as_json:
        click.echo(json.dumps({"found": [asdict(d) for d in found], "absent": [asdict(a) for a in missing]}, indent=1))
    else:
        _print(found, missing)


def _print(found: list[Device], missing: list[Absence]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("device", "name", "memory", "free", "KV cache", "computes in"):
        table.add_column(heading, justify="right" if heading in ("memory", "free") else "left", overflow="fold")
    for device in found:
        table.add_row(
            device.name,
            device.full_name,
            f"{device.total_memory_bytes / 1e9:.1f} GB",
            f"{device.free_memory_bytes / 1e9:.1f} GB",
            "paged" if device.paged else "not yet",
            ", ".join(device.capabilities),
        )
    Console(markup=False).print(table)
    for absence in missing:
        click.echo(f"no {absence.kind}: {absence.reason}; {absence.remedy}")
