"""`meshinfer devices`: what this machine can compute with, and why something is missing."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from meshinfer.cli.words import size
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
    for device in found:
        click.echo(f"{device.name}: {device.full_name}")
        click.echo(f"  {'memory:':13}{size(device.total_memory_bytes)}, {size(device.free_memory_bytes)} free")
        click.echo(f"  {'KV cache:':13}{'paged' if device.paged else 'not yet'}")
        click.echo(f"  {'computes in:':13}{', '.join(device.capabilities)}")
    for absence in missing:
        click.echo(f"no {absence.kind}: {absence.reason}")
        click.echo(click.wrap_text(absence.remedy, 80, "  ", "  "))
