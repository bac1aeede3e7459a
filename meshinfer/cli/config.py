"""`meshinfer config`: what an agent would be told here, and where each setting is from."""

from __future__ import annotations

import json
from pathlib import Path

import click

from meshinfer.cli.options import agent_options
from meshinfer.cli.show import print_table
from meshinfer.cli.words import size
from meshinfer.config import Folders, load_settings
from meshinfer.settings import Settings, host_port_text

_HIDDEN = "********"


@click.command("config")
@agent_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(folders: Folders, given: dict[str, object], config: Path | None, as_json: bool) -> None:
    """Show the settings of an agent that is started with these options, and where each is from."""
    settings, origins = load_settings(folders, given, config)
    values = _values(settings)
    if as_json:
        shown = {key: {"value": value, "from": origins[field]} for key, (field, value) in values.items()}
        click.echo(json.dumps(shown, indent=1, ensure_ascii=False))
    else:
        rows = [(key, _words(key, value), origins[field]) for key, (field, value) in values.items()]
        print_table(("key", "value", "from"), rows)


def _values(settings: Settings) -> dict[str, tuple[str, object]]:
    """By the key of the config file: a field it sets, and its value; secrets are hidden."""
    return {
        "model": ("model", settings.model),
        "name": ("name", settings.name),
        "api": ("api_host", host_port_text(settings.api_host, settings.api_port)),
        "port": ("port", settings.port),
        "join": ("join", settings.join and _HIDDEN),
        "peer": ("peers", settings.peers),
        "memory": ("memory_bytes", settings.memory_bytes),
        "device": ("device", settings.device),
        "exact": ("exact", settings.exact),
        "interface": ("interfaces", settings.interfaces),
        "threads": ("threads", settings.threads),
        "context": ("context_tokens", settings.context_tokens),
        "users": ("users", settings.users),
        "api-key": ("api_key", settings.api_key and _HIDDEN),
        "mdns": ("discovery", settings.discovery),
    }


def _words(key: str, value: object) -> str:
    match value:
        case None | ():
            return "-"
        case bool():
            return "true" if value else "false"
        case tuple():
            return ", ".join(map(str, value))
        case int() if key == "memory":
            return size(value)
        case _:
            return str(value)
