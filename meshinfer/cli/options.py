"""The options of an agent, for every command that takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from meshinfer.settings import KEYS

_OPTIONS = (
    click.option("--model", help="Model to serve: a name, or a source to add it from."),
    click.option("--name", help="What this node is called.  [default: the name of the machine]"),
    click.option("--api", metavar="HOST:PORT", help="Where the HTTP API listens.  [default: 127.0.0.1:8000]"),
    click.option("--port", type=int, help="Port for other nodes; 0 takes any.  [default: 7420 or the next free one]"),
    click.option("--join", metavar="CODE", help="Join code of the mesh; needed once."),
    click.option("--peer", metavar="HOST:PORT", multiple=True, help="A node to dial; may be given several times."),
    click.option("--memory", metavar="SIZE", help="Memory to use, as in 6GB.  [default: what is free, less a reserve]"),
    click.option("--device", help="Device to compute with; auto takes the best one.  [default: auto]"),
    click.option("--exact/--no-exact", default=None, help="f32 everywhere: the tokens of the unsplit model."),
    click.option("--interface", multiple=True, help="Network interface to use, by name or address; several times."),
    click.option("--threads", type=int, help="Inference threads.  [default: all cores]"),
    click.option("--context", type=int, help="Tokens of a request that room is kept for."),
    click.option("--users", type=int, help="Requests at once.  [default: 8]"),
    click.option("--api-key", metavar="KEY", help="What clients of the API have to send; better in the config file."),
    click.option("--mdns/--no-mdns", default=None, help="Find nodes by multicast.  [default: mdns]"),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="Config file: TOML, with these options as keys.  [default: config.toml in the home]",
    ),
)


def agent_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options. It is called with `given` and `config`, which `load_settings` takes."""

    @functools.wraps(function)
    def collect(*arguments: Any, config: Path | None, **options: Any) -> Any:
        said = {key: options.pop(key.replace("-", "_")) for key in KEYS}
        given = {key: value for key, value in said.items() if value is not None and value != ()}
        return function(*arguments, given=given, config=config, **options)

    for option in reversed(_OPTIONS):
        collect = option(collect)
    return collect
