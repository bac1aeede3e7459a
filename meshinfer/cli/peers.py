"""`meshinfer peers`: the links to other nodes, and who cannot be reached."""

from __future__ import annotations

import json

import click

from meshinfer.config import Folders
from meshinfer.settings import host_port_text


@click.command("peers")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(folders: Folders, as_json: bool) -> None:
    """Show the links to other nodes, who cannot be reached, and why this node is alone if it is."""
    from meshinfer.cli.client import Client
    from meshinfer.cli.show import print_table
    from meshinfer.cli.tables import PEERS, peer_rows, why_alone

    status = Client.of(folders).status()
    if as_json:
        keys = ("id", "name", "mesh", "port", "peers", "unreachable", "other_meshes")
        click.echo(json.dumps({key: status[key] for key in keys}, indent=1, ensure_ascii=False))
        return
    if status["peers"]:
        print_table(PEERS, peer_rows(status), right=("round trip", "goodput", "clock"))
    else:
        click.echo(f"{status['name']} is alone in its mesh")
        for line in why_alone(status):
            click.echo(f"  {line}")
    if status["unreachable"]:
        click.echo()
        where = ((host_port_text(entry["host"], entry["port"]), entry["reason"]) for entry in status["unreachable"])
        print_table(("not reached", "because"), where)
