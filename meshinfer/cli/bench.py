"""`meshinfer bench`: measure speed on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from meshinfer.cli.show import print_table, progress_bars
from meshinfer.cli.words import plural
from meshinfer.config import Folders

if TYPE_CHECKING:
    from meshinfer.bench.ring import RingResult
    from meshinfer.bench.stage import Row


class Numbers(click.ParamType[tuple[int, ...]]):
    """A list such as 1,2,4."""

    name = "N,N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}' is not a list of whole numbers such as 1,2,4", param, ctx)
        if min(numbers) < 1:
            self.fail(f"'{value}' has a number below 1", param, ctx)
        return numbers


class Backends(click.ParamType[tuple[str, ...]]):
    """A list such as paged,stateful."""

    name = "KV,KV"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(str(value).split(","))
        if not set(names) <= {"paged", "stateful"}:
            self.fail(f"'{value}' is not a list of paged and stateful", param, ctx)
        return names


_PARTS = {
    "inference": "inference_ms",
    "codec": "codec_ms",
    "waiting": "waiting_ms",
    "scheduling": "scheduling_ms",
    "network": "network_ms",
    "hop": "hop_overhead_ms",
}
"""Of a step's time, by their headings."""


@click.group("bench")
def command() -> None:
    """Measure speed on this machine."""


@command.command("stage")
@click.argument("model")
@click.option("--stages", type=Numbers(), default="1,2,3", show_default=True, help="Numbers of stages.")
@click.option("--kv", type=Backends(), help="KV back ends.  [default: those that reproduce the model]")
@click.option("--sequences", type=Numbers(), default="1,4,16", show_default=True, help="Numbers of sequences at once.")
@click.option("--exact", is_flag=True, help="Measure exact mode.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads of every contender."
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens before the clock.")
@click.option("--decode-tokens", type=click.IntRange(8), default=64, show_default=True, help="Tokens under the clock.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Times each is measured.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def stage(
    folders: Folders,
    model: str,
    stages: tuple[int, ...],
    kv: tuple[str, ...] | None,
    sequences: tuple[int, ...],
    exact: bool,
    threads: int,
    prompt_tokens: int,
    decode_tokens: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Decode tokens/s of composed stages, of a plain loop on the unsplit IR and of openvino-genai, interleaved."""
    from meshinfer.bench.stage import BenchOptions, check_options, measure
    from meshinfer.bench.stage import as_json as to_json
    from meshinfer.models.check import unsplit_graph, usable_backend
    from meshinfer.shards.store import Store
    from meshinfer.types import kv_backend

    store = Store(folders)
    manifest = store.load(model)
    options = BenchOptions(
        stages=stages,
        kv=tuple(usable_backend(manifest, kv_backend(name)) for name in kv) if kv else manifest.kv_backends,
        sequences=sequences,
        precision="exact" if exact else "fast",
        threads=threads,
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        rounds=rounds,
    )
    check_options(manifest, options)
    with progress_bars() as progress, unsplit_graph(store, manifest, progress) as graph:
        rows = measure(store, manifest, graph, options, progress)
    if as_json:
        click.echo(json.dumps(to_json(manifest, options, rows), indent=1))
    else:
        _print_rows(rows)


def _print_rows(rows: list[Row]) -> None:
    headings = ("contender", "sequences", "tokens/s", "lowest", "highest", "of loop", "of genai")
    cells = [
        (
            row.contender,
            str(row.sequences),
            f"{row.median:.1f}",
            f"{row.lowest:.1f}",
            f"{row.highest:.1f}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in (row.against_plain_loop, row.against_genai)),
        )
        for row in rows
    ]
    print_table(headings, cells, right=headings[1:])


@command.command("ring")
@click.argument("model")
@click.option("--hosts", type=click.IntRange(1, 16), default=2, show_default=True, help="Hosts, with a core each.")
@click.option("--users", type=Numbers(), default="1,2", show_default=True, help="Numbers of users at once.")
@click.option("--exact", is_flag=True, help="Measure exact mode.")
@click.option("--tokens", type=click.IntRange(16), default=64, show_default=True, help="Tokens of each user.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times each is measured.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def ring(
    folders: Folders,
    model: str,
    hosts: int,
    users: tuple[int, ...],
    exact: bool,
    tokens: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Decode tokens/s of a ring of agents on hosts with a core each, and of the unsplit model on one core, interleaved.

    The hosts are network namespaces on this machine: that needs root on Linux, and a checkout.
    """
    from meshinfer.bench.ring import RingOptions, measure
    from meshinfer.bench.ring import as_json as to_json
    from meshinfer.files.work import work_folder
    from meshinfer.models.check import unsplit_graph
    from meshinfer.shards.lend import lend
    from meshinfer.shards.store import Store

    store = Store(folders)
    manifest = store.load(model)
    options = RingOptions(hosts, users, tokens, rounds, "exact" if exact else "fast")
    with (
        progress_bars() as progress,
        unsplit_graph(store, manifest, progress) as graph,
        work_folder(folders) as root,
    ):
        lend(manifest, store, Store(Folders(root / "pc-1")))
        result = measure(root, manifest.name, graph, options, progress)
    if as_json:
        click.echo(json.dumps(to_json(manifest.name, options, result), indent=1))
    else:
        _print_ring(result)


def _print_ring(result: RingResult) -> None:
    from statistics import median

    click.echo("; ".join(result.stages))
    headings = ("contender", "tokens/s", "lowest", "highest", "of unsplit", *_PARTS)
    unsplit = result.unsplit
    rows = [("unsplit", f"{median(unsplit):.1f}", f"{min(unsplit):.1f}", f"{max(unsplit):.1f}", "1.00", *["-"] * 6)]
    for row in result.rows:
        times = [f"{row.timing[part]:.2f}" if part in row.timing else "-" for part in _PARTS.values()]
        numbers = (f"{value:.1f}" for value in (row.median, row.lowest, row.highest))
        rows.append((f"{plural(row.users, 'user')}", *numbers, f"{row.against_unsplit:.2f}", *times))
    print_table(headings, rows, right=headings[1:])
    click.echo("times are medians of a step over all stages in ms; hop: all but inference, for one hop")
