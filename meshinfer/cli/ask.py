"""`meshinfer ask`: one answer from the mesh, asked at this machine."""

from __future__ import annotations

from typing import Any

import click

from meshinfer.cli.answers import answer_options, prompt_text, wait_until_ready
from meshinfer.config import Folders


@click.command("ask")
@click.argument("prompt", required=False)
@click.option("--system", help="System message.")
@click.option("--stats", is_flag=True, help="Print speed on stderr.")
@answer_options
@click.pass_obj
def command(
    folders: Folders, prompt: str | None, system: str | None, stats: bool, options: dict[str, Any], wait: float
) -> None:
    """Ask the mesh a question and stream the answer. The PROMPT is read from stdin where it is not given."""
    from meshinfer.cli.client import Client

    text = prompt_text(prompt, 'meshinfer ask "Why?"')
    client = Client.of(folders)
    wait_until_ready(client, wait)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    with client.chat(messages, options) as answer:
        for piece in answer:
            click.echo(piece, nl=False)
    click.echo()
    if stats:
        click.echo(str(answer), err=True)
