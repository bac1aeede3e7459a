"""`meshinfer down`: stop the agent of this machine."""

from __future__ import annotations

import click

from meshinfer.config import Folders


@click.command("down")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds to wait until its process is gone; 0 returns at once.",
)
@click.pass_obj
def command(folders: Folders, wait: float) -> None:
    """Stop the agent of this machine, and wait until it is gone."""
    from meshinfer.agent.runtime import read_runtime
    from meshinfer.cli.client import Client
    from meshinfer.cli.processes import wait_until_gone
    from meshinfer.cli.show import spinner
    from meshinfer.errors import MeshinferError

    runtime = read_runtime(folders)
    Client.of(folders).down()
    if not wait:
        click.echo(f"{runtime.name} is stopping")
        return
    with spinner(f"{runtime.name} is stopping"):
        gone = wait_until_gone(folders, runtime.pid, wait)
    if not gone:
        raise MeshinferError(f"{runtime.name} (process {runtime.pid}) is still there after {wait:g} s")
    click.echo(f"{runtime.name} has stopped")
