"""`meshinfer status`: what the mesh does, as the agent of this machine sees it."""

from __future__ import annotations

import json

import click

from meshinfer.config import Folders


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(folders: Folders, as_json: bool) -> None:
    """Show the model, the nodes and what they are doing, and how fast that is."""
    from meshinfer.cli.client import Client
    from meshinfer.cli.show import print_table
    from meshinfer.cli.tables import NODES, headline, measured, node_rows, predicted
    from meshinfer.cli.words import plural

    status = Client.of(folders).status()
    if as_json:
        click.echo(json.dumps(status, indent=1, ensure_ascii=False))
        return
    click.echo(headline(status))
    if status["trouble"] and status["trouble"] != status["stage"]:
        click.echo(f"trouble: {status['trouble']}")
    if status["plan"]:
        click.echo(f"predicted: {predicted(status['plan'])}")
    if status["timing"]:
        click.echo(f"measured: {measured(status['timing'])}")
    click.echo()
    print_table(NODES, node_rows(status), right=("memory",))
    click.echo()
    click.echo(f"API: {status['api']}/v1, {plural(status['answered'], 'request')} answered")
    click.echo(f"others join with: meshinfer up --join {status['join_code']}")
