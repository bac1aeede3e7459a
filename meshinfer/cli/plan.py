"""`meshinfer plan`: which node runs which layers, and why; also for nodes that are not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from meshinfer.config import Folders, read_toml


@click.command("plan")
@click.option("--why", is_flag=True, help="Give the reason of each node, also of those left out.")
@click.option(
    "--dry-run", "file", metavar="FILE", type=click.Path(path_type=Path), help="Plan for the nodes of a TOML file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(folders: Folders, why: bool, file: Path | None, as_json: bool) -> None:
    """Show which node runs which layers, and how fast that should be.

    With --dry-run no agent is needed: FILE describes a model, nodes and links, as examples/office.toml does.
    """
    from meshinfer.errors import MeshinferError, NotReadyError

    if file is not None:
        shown, nodes, missing = _dry_run(folders, file, why or as_json)
        error: MeshinferError = MeshinferError(f"no plan: {missing}")
    else:
        from meshinfer.cli.client import Client

        status = Client.of(folders).status()
        shown = {key: status[key] for key in ("plan", "preparing", "ready", "stage")}
        nodes = {node["id"]: node["name"] for node in status["nodes"]}
        error = NotReadyError(f"no plan yet: {status['stage']}")
    if as_json:
        click.echo(json.dumps(shown, indent=1, ensure_ascii=False))
    if shown["plan"] is None:
        raise error
    if not as_json:
        _print(shown["plan"], shown.get("preparing"), nodes, why)


def _print(plan: dict[str, Any], preparing: dict[str, Any] | None, nodes: Mapping[str, str], why: bool) -> None:
    from meshinfer.cli.show import print_table
    from meshinfer.cli.tables import STAGES, predicted, reason_rows, stage_rows
    from meshinfer.cli.words import plural

    room = f"room for {plural(plan['users'], 'request')} of {plural(plan['context_tokens'], 'token')}"
    click.echo(f"{plan['model']}, {room}")
    click.echo(f"predicted: {predicted(plan)}\n")
    print_table(STAGES, stage_rows(plan))
    if why:
        click.echo()
        print_table(("node", "why"), reason_rows(plan, nodes))
    if preparing is not None:
        stages = ", ".join(f"{node} {shards}" for node, shards, _ in stage_rows(preparing))
        click.echo(f"\nthe next plan is being prepared: {stages}")


def _dry_run(folders: Folders, file: Path, why: bool) -> tuple[dict[str, Any], dict[str, str], str]:
    """What the nodes of a file would get: as an agent says it, the nodes, and what is missing."""
    from meshinfer.negotiation.problem import model_spec
    from meshinfer.planning.hypothetical import BYTES_PER_VALUE, outcome, parse
    from meshinfer.shards.store import Store

    asked = parse(read_toml(file), str(file))
    model = asked.model
    if isinstance(model, str):
        model = model_spec(Store(folders).load(model), BYTES_PER_VALUE)
    found = outcome(model, asked, why)
    nodes = {str(node.id): node.name for node in asked.nodes}
    if found.ring is None:
        return {"plan": None, "shortage": str(found.shortage)}, nodes, str(found.shortage)
    users = asked.demand.sequences
    plan = {
        "model": model.name,
        "context_tokens": asked.demand.context_tokens,
        "users": users,
        "tokens_per_s": round(found.ring.prediction.tokens_per_s(1), 2),
        "tokens_per_s_together": round(found.ring.prediction.tokens_per_s(users), 2),
        "stages": [{"node": s.node, "id": s.node, "first": s.start, "last": s.stop - 1} for s in found.ring.stages],
        "reasons": [{"node": node, "id": node, "reason": reason} for node, reason in found.reasons.items()],
    }
    return {"plan": plan}, nodes, ""
