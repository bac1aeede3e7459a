"""The `meshinfer` command: finds the command that was asked for, and turns every failure into one line.

A command lives in a file of its own, `meshinfer/cli/<name>.py`, as the click command `command`; it is imported when
it runs. It gets the folders with `@click.pass_obj`.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import IO, Any

import click

from meshinfer import __version__
from meshinfer.config import folders
from meshinfer.errors import MeshinferError

COMMANDS = {
    "run": "Ask a model one question and stream its answer.",
    "model": "Add, list, show, verify and remove models.",
    "devices": "Show what this machine can compute with.",
    "bench": "Measure speed on this machine.",
}
"""Every command with its line in the help: no command is imported to print it."""

INTERRUPTED_EXIT_CODE = 130


class LazyGroup(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"meshinfer.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. The only place where an exception becomes a message and an exit code."""
        _make_printable(sys.stdout)
        _make_printable(sys.stderr)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if isinstance(error, MeshinferError):
                message, exit_code = str(error), error.exit_code
            else:
                message = f"unexpected {type(error).__name__}: {error} (a fault of meshinfer; --debug shows where)"
                exit_code = MeshinferError.exit_code
            click.echo(f"error: {' '.join(message.split())}", err=True)
            raise click.exceptions.Exit(exit_code) from error


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="meshinfer")
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for models.  [default: $MESHINFER_HOME, or the user's data folder]",
)
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
@click.pass_context
def main(ctx: click.Context, home: Path | None, debug: bool) -> None:
    """Large language models served by the PCs an office already owns."""
    ctx.obj = folders(home)


def _make_printable(stream: IO[str] | None) -> None:
    """Let a character that the terminal lacks become "?", and pipes on Windows carry UTF-8."""
    if isinstance(stream, io.TextIOWrapper):
        piped_on_windows = os.name == "nt" and not stream.isatty()
        stream.reconfigure(errors="replace", encoding="utf-8" if piped_on_windows else None)


if __name__ == "__main__":
    main()
