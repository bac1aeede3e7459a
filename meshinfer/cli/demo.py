"""`meshinfer demo`: a mesh of several agents on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshinfer.config import Folders
from meshinfer.errors import InputError, MeshinferError, NotReadyError

if TYPE_CHECKING:
    from meshinfer.cli.local_mesh import LocalMesh
    from meshinfer.shards.manifest import Manifest

QUESTION = "What is the capital of France?"
MOST_TOKENS = 64
CONTEXT_TOKENS = 1024
READY_S = 600.0
DEATH_S = 1.0
"""How long a process may take to end whose agent has stopped to answer."""


@click.command("demo")
@click.option("--model", default="smollm2-135m", show_default=True, help="A model here, or a source to add it from.")
@click.option("--nodes", type=click.IntRange(1, 16), default=3, show_default=True, help="Agents to start.")
@click.option("--exact", is_flag=True, help="f32 everywhere: the tokens of the unsplit model.")
@click.option("--keep", is_flag=True, help="Leave the agents running.")
@click.option("--stop", is_flag=True, help="Stop the agents that --keep left running.")
@click.pass_obj
def command(folders: Folders, model: str, nodes: int, exact: bool, keep: bool, stop: bool) -> None:
    """Start several agents on this machine, let them share one model, and ask each of them a question.

    Each has so little memory that all are needed. The first one has the model, the others fetch their layers from it.
    """
    from meshinfer.cli.local_mesh import LocalMesh, forget_mesh, running, stop_all
    from meshinfer.cli.words import plural

    root = folders.home / "demo"
    if stop:
        count = stop_all(root)
        click.echo(f"{plural(count, 'agent')} stopped" if count else "no demo is running")
        return
    if running(root):
        raise InputError("a demo is running already: stop it with meshinfer demo --stop")
    manifest = _model(folders, root, model)
    options, megabytes = needing_all(manifest, nodes, exact)
    forget_mesh(root)
    click.echo(f"{plural(nodes, 'agent')} with {megabytes} MB each for {manifest.name}, on loopback, in {root}")
    mesh = LocalMesh(root, options, lasting=keep)
    done = False
    try:
        _show(mesh, manifest, nodes)
        done = True
    except MeshinferError as error:
        died = mesh.death(DEATH_S)
        for line in died.log if died else ():
            click.echo(f"  {line}", err=True)
        raise died or error from None
    finally:
        if not (keep and done):
            mesh.close()
    if keep:
        _say_where(mesh)


def _model(folders: Folders, root: Path, name: str) -> Manifest:
    """The model, added if it has to be, for the first agent as well. Raises all that adding a model does."""
    from meshinfer.cli.local_mesh import home_of
    from meshinfer.cli.show import progress_bars
    from meshinfer.models.add import add_model
    from meshinfer.shards.lend import lend
    from meshinfer.shards.store import Store

    store = Store(folders)
    if name in store.names():
        manifest = store.load(name)
    else:
        with progress_bars() as progress:
            manifest = add_model(store, name, progress=progress)
    lend(manifest, store, Store(home_of(root, 1)))
    return manifest


def needing_all(manifest: Manifest, nodes: int, exact: bool) -> tuple[list[str], int]:
    """What each agent is told so that all are needed, and the MB of memory that it has for layers and KV cache."""
    from meshinfer.agent.capacity import usable_cores
    from meshinfer.negotiation.problem import WORKING_BYTES, model_spec
    from meshinfer.planning.specs import Demand
    from meshinfer.planning.spread import memory_for_all

    demand = Demand(min(CONTEXT_TOKENS, manifest.context_tokens), nodes)
    memory = memory_for_all(model_spec(manifest, 2), demand, nodes)
    options = ["--memory", str(memory + WORKING_BYTES), "--context", str(demand.context_tokens)]
    options += ["--users", str(nodes), "--threads", str(max(1, usable_cores() // nodes))]
    return [*options, "--exact"] if exact else options, memory // 1_000_000


def _show(mesh: LocalMesh, manifest: Manifest, nodes: int) -> None:
    """Start the agents, wait until they serve the model, and ask each."""
    from meshinfer.cli.answers import wait_until_ready
    from meshinfer.cli.show import print_table, spinner
    from meshinfer.cli.tables import measured, predicted, reason_rows, stage_rows

    began = time.monotonic()
    with spinner("starting agents") as say:
        mesh.start(nodes, say)
        mesh.agents[0].client.use(manifest.name)
        status = _ready(mesh, say)
    ring = "; ".join(f"{node} {layers}" for node, _, layers in stage_rows(status["plan"]))
    click.echo(f"ready after {time.monotonic() - began:.1f} s: {ring}")
    options = {"max_tokens": MOST_TOKENS, "temperature": 0}
    for agent in mesh.agents:
        wait_until_ready(agent.client, READY_S)  # the nodes may plan again once they have measured themselves
        click.echo(f"\n{agent.name}> {QUESTION}")
        with agent.client.chat([{"role": "user", "content": QUESTION}], options) as answer:
            for piece in answer:
                click.echo(piece, nl=False)
        click.echo(f"\n      {answer}")
    statuses = mesh.statuses()
    plan = statuses[0]["plan"]
    why = dict(reason_rows(plan, {}))
    rows = [(node, layers, why[node].partition(": ")[2]) for node, _, layers in stage_rows(plan)]
    click.echo()
    print_table(("node", "layers", "time and memory"), rows)
    click.echo(f"predicted: {predicted(plan)}")
    for status in statuses:
        if status["timing"]:
            click.echo(f"measured: {measured(status['timing'])}")


def _ready(mesh: LocalMesh, say: Any) -> dict[str, Any]:
    """The status of the first agent once all are ready. Raises InputError, NotReadyError."""
    from meshinfer.cli.local_mesh import POLL_S

    deadline = time.monotonic() + READY_S
    while True:
        statuses = mesh.statuses()
        waiting = [status for status in statuses if not status["ready"]]
        if not waiting:
            return statuses[0]
        if trouble := statuses[0]["trouble"]:
            raise InputError(trouble)
        if time.monotonic() > deadline:
            raise NotReadyError(f"not ready after {READY_S:.0f} s: {waiting[0]['stage']}")
        say(waiting[0]["stage"])
        time.sleep(POLL_S)


def _say_where(mesh: LocalMesh) -> None:
    click.echo("\nthe agents go on:")
    for agent in mesh.agents:
        click.echo(f"  {agent.name}  {agent.client.api}/v1  (meshinfer --home {agent.folders.home} status)")
    click.echo("stop them with: meshinfer demo --stop")
