"""`meshinfer up`: run the agent of this machine."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import click

from meshinfer.cli.options import agent_options
from meshinfer.config import Folders, load_settings

END_S = 3.0
"""How long threads may go on after the agent has stopped."""


@click.command("up")
@click.option("--until-eof", is_flag=True, hidden=True, help="Stop when stdin ends.")
@agent_options
@click.pass_obj
def command(folders: Folders, given: dict[str, object], config: Path | None, until_eof: bool) -> None:
    """Run the agent of this machine until Ctrl-C: it finds the others, carries layers, and answers prompts.

    The first one of a mesh prints a join code; the others are started once with --join CODE. The model is chosen once,
    at any of them, with --model or with: meshinfer use MODEL
    """
    from meshinfer.agent.service import Show, run_agent
    from meshinfer.cli.lifeline import end_with_stdin, end_within
    from meshinfer.cli.panel import log_lines, panel

    async def run(show: Show | None = None) -> None:
        await run_agent(folders, settings, show)
        end_within(END_S)

    settings, _ = load_settings(folders, given, config)
    if until_eof:
        end_with_stdin()
    if sys.stderr.isatty() and sys.stdout.isatty():
        asyncio.run(run(panel()))
    else:
        log_lines(logging.INFO)
        asyncio.run(run())
