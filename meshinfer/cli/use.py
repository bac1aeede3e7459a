"""`meshinfer use`: choose the model of the mesh."""

from __future__ import annotations

import time

import click

from meshinfer.config import Folders


@click.command("use")
@click.argument("model")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help="Seconds to wait until it can be asked; 0 returns at once.",
)
@click.pass_obj
def command(folders: Folders, model: str, wait: float) -> None:
    """Choose the MODEL of the mesh and wait until it can be asked.

    MODEL is one that this machine or another node has, or a source to add it from.
    """
    from meshinfer.cli.answers import POLL_S
    from meshinfer.cli.client import Client
    from meshinfer.cli.show import spinner
    from meshinfer.cli.tables import predicted
    from meshinfer.errors import InputError, NotReadyError

    client = Client.of(folders)
    deadline = time.monotonic() + wait
    client.use(model)
    status = client.status()
    with spinner(f"choosing {model}") as say:
        while not _serves(status) and not status["trouble"] and time.monotonic() < deadline:
            say(status["stage"])
            time.sleep(POLL_S)
            status = client.status()
    if status["trouble"]:
        raise InputError(status["trouble"])
    if not wait:
        click.echo(f"{model} is chosen: meshinfer status shows how far it is")
    elif _serves(status):
        click.echo(f"{status['model']} is ready: {predicted(status['plan'])} (predicted)")
        click.echo('ask it: meshinfer ask "What is the capital of France?"')
    else:
        raise NotReadyError(f"not ready after {wait:g} s: {status['stage']}; it goes on, see meshinfer status")


def _serves(status: dict[str, object]) -> bool:
    """Whether the mesh serves what was chosen last, and not still what was before."""
    plan = status["plan"]
    return (
        not status["choosing"] and bool(status["ready"]) and isinstance(plan, dict) and plan["model"] == status["model"]
    )
