"""`meshinfer model`: add, list, show, verify and remove models."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from meshinfer.cli.show import print_table, progress_bars
from meshinfer.cli.words import plural, size
from meshinfer.config import Folders

if TYPE_CHECKING:
    from meshinfer.shards.manifest import Manifest

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("model")
def command() -> None:
    """Add, list, show, verify and remove models."""


@command.command("add")
@click.argument("source")
@click.option("--name", help="What to call it here.  [default: from the source]")
@click.option(
    "--bits",
    type=click.Choice(["4", "8", "16", "32"]),
    help="Precision to export a checkpoint's weights to.  [default: 4]",
)
@as_json_option
@click.pass_obj
def add(folders: Folders, source: str, name: str | None, bits: str | None, as_json: bool) -> None:
    """Fetch a model, cut it into layer shards and verify them.

    SOURCE is a known alias (smollm2-135m), a .gguf file, a folder with an OpenVINO IR or a Hugging Face checkpoint,
    or a Hugging Face repository (org/name or org/name@revision).
    """
    from meshinfer.models.add import add_model
    from meshinfer.shards.store import Store

    def waiting() -> None:
        click.echo("another process is adding this model: waiting for it", err=True)

    started = time.monotonic()
    with progress_bars() as progress:
        manifest = add_model(
            Store(folders), source, name=name, bits=int(bits) if bits else None, progress=progress, on_wait=waiting
        )
    if as_json:
        click.echo(json.dumps(summary(manifest) | {"seconds": round(time.monotonic() - started, 2)}, indent=1))
        return
    click.echo(f"{manifest.name}: {len(manifest.shards)} shards, {size(manifest.size_bytes)}, {manifest.precision}")
    for check in manifest.verification:
        click.echo(
            f"  {check.kv}: {round(check.top1_agreement * check.tokens)}/{check.tokens} tokens as the unsplit model, "
            f"largest difference {check.max_abs_diff:.2g}"
        )
    click.echo(f'ask it: meshinfer run {manifest.name} "What is the capital of France?"')


@command.command("list")
@as_json_option
@click.pass_obj
def list_models(folders: Folders, as_json: bool) -> None:
    """List the models here."""
    from meshinfer.errors import InputError
    from meshinfer.shards.store import Store

    store = Store(folders)
    rows: list[dict[str, Any]] = []
    for name in store.names():
        try:
            rows.append(summary(store.load(name)))
        except InputError as error:
            rows.append({"name": name, "error": str(error)})
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif not rows:
        click.echo("no models yet; add one: meshinfer model add smollm2-135m")
    else:
        _print_list(rows)


@command.command("show")
@click.argument("name", metavar="MODEL")
@as_json_option
@click.pass_obj
def show(folders: Folders, name: str, as_json: bool) -> None:
    """Show one model: its shards, what crosses the cuts, what its KV cache costs."""
    from meshinfer.shards.store import Store

    manifest = Store(folders).load(name)
    if as_json:
        click.echo(json.dumps(asdict(manifest) | summary(manifest), indent=1))
    else:
        _print_manifest(manifest)


@command.command("verify")
@click.argument("name", metavar="MODEL")
@click.option("--stages", default=1, show_default=True, help="Stages to compose.")
@click.option("--kv", type=click.Choice(["paged", "stateful"]), help="KV back end.  [default: the model's best]")
@as_json_option
@click.pass_obj
def verify(folders: Folders, name: str, stages: int, kv: str | None, as_json: bool) -> None:
    """Check every file's hash, then compare the composed stages with the unsplit model in exact mode."""
    from meshinfer.models.check import verify_model
    from meshinfer.shards.store import Store
    from meshinfer.types import kv_backend

    with progress_bars() as progress:
        result = verify_model(Store(folders), name, stages, kv_backend(kv) if kv else None, progress)
    if as_json:
        click.echo(json.dumps({"name": name} | asdict(result), indent=1))
    else:
        click.echo(
            f"{name}, {plural(stages, 'stage')}, {result.kv}: max_abs_diff {result.max_abs_diff:g}, "
            f"tokens_equal {str(result.tokens_equal).lower()}, top1_agreement {result.top1_agreement:g} "
            f"over {result.tokens} tokens"
        )
    if not result.reproduced:
        raise click.exceptions.Exit(1)


@command.command("rm")
@click.argument("name", metavar="MODEL")
@as_json_option
@click.pass_obj
def remove(folders: Folders, name: str, as_json: bool) -> None:
    """Forget a model and delete the files that only it uses."""
    from meshinfer.shards.store import Store

    freed = Store(folders).remove(name)
    if as_json:
        click.echo(json.dumps({"name": name, "freed_bytes": freed}))
    else:
        click.echo(f"{name} removed, {size(freed)} freed{'' if freed else ': another model has the same files'}")


def summary(manifest: Manifest) -> dict[str, Any]:
    """What a list of models says of one."""
    return {
        "name": manifest.name,
        "fingerprint": manifest.fingerprint(),
        "source": manifest.source,
        "precision": manifest.precision,
        "layers": sum(shard.kind == "layer" for shard in manifest.shards),
        "shard_count": len(manifest.shards),
        "size_bytes": manifest.size_bytes,
        "context_tokens": manifest.context_tokens,
        "kv_bytes_per_token": manifest.kv_bytes_per_token,
        "kv_backends": list(manifest.kv_backends),
    }


def _print_list(rows: list[dict[str, Any]]) -> None:
    cells = [
        (row["name"], *("-" * 5), row["error"])
        if "error" in row
        else (
            row["name"],
            row["precision"],
            str(row["layers"]),
            size(row["size_bytes"]),
            str(row["context_tokens"]),
            ", ".join(row["kv_backends"]) or "none",
            row["source"],
        )
        for row in rows
    ]
    headings = ("name", "precision", "layers", "size", "context", "KV cache", "source")
    print_table(headings, cells, right=("layers", "size", "context"))


def _print_manifest(manifest: Manifest) -> None:
    facts = {
        "fingerprint": manifest.fingerprint(),
        "source": f"{manifest.source} ({manifest.revision[:12]})",
        "precision": manifest.precision,
        "context": f"{manifest.context_tokens} tokens",
        "size": size(manifest.size_bytes),
        "KV cache": f"{size(manifest.kv_bytes_per_token)} a token in f32; {', '.join(manifest.kv_backends)}",
        "template": "yes" if manifest.chat_template else "none: prompts are continued as they are",
        "made with": ", ".join(f"{what} {which}" for what, which in manifest.versions.items()),
    }
    click.echo(manifest.name)
    for what, which in facts.items():
        click.echo(f"  {what + ':':13}{which}")
    for check in manifest.verification:
        click.echo(
            f"  {'verified:':13}{check.kv}, largest difference {check.max_abs_diff:.2g} over {check.tokens} tokens"
        )
    click.echo()
    rows = [
        (
            str(shard.index),
            shard.kind,
            size(shard.size_bytes),
            size(shard.kv_bytes_per_token),
            shard.weights.sha256[:12],
            ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in shard.outputs),
        )
        for shard in manifest.shards
    ]
    headings = ("shard", "kind", "size", "KV a token", "weights", "gives")
    print_table(headings, rows, right=("shard", "size", "KV a token"))
