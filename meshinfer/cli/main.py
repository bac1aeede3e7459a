"""The `meshinfer` command: finds the command that was asked for, and turns every failure into one line.

A command lives in a file of its own, `meshinfer/cli/<name>.py`, as the click command `command`; it is imported when
it runs. It gets the folders with `@click.pass_obj`.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click

from meshinfer import __version__
from meshinfer.config import folders
from meshinfer.errors import MeshinferError

COMMANDS = {
    "demo": "See it work: several agents on this machine, one model.",
    "up": "Run the agent of this machine: find others, carry layers, answer.",
    "use": "Choose the model of the mesh.",
    "ask": "Ask the mesh one question and stream its answer.",
    "chat": "Talk with the mesh.",
    "status": "Show the model, the nodes, and what they are doing.",
    "plan": "Show which node runs which layers, and why.",
    "peers": "Show the links to other nodes, and who cannot be reached.",
    "down": "Stop the agent of this machine.",
    "model": "Add, list, show, verify and remove models.",
    "run": "Ask a model one question in this process, without a mesh.",
    "devices": "Show what this machine can compute with.",
    "config": "Show the settings of an agent, and where they are from.",
    "bench": "Measure speed on this machine.",
}
"""Every command with its line in the help: no command is imported to print it."""

INTERRUPTED_EXIT_CODE = 130
_CANNOT_WRITE = {errno.EINVAL, errno.ENOSPC, errno.EBADF, errno.EIO}


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
        """Run the command that was asked for."""
        self._debug = bool(ctx.params.get("debug"))
        return super().invoke(ctx)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """The only place where an exception becomes a message and an exit code."""
        self._debug = False
        try:
            _make_printable(sys.stdout)
            _make_printable(sys.stderr)
            code = super().main(args, prog_name, standalone_mode=False, **extra)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BaseException as error:
            code = self._report(error)
        sys.exit(code)

    def _report(self, error: BaseException) -> int:
        """Say in one line what went wrong; the exit code."""
        if isinstance(error, (KeyboardInterrupt, click.Abort)):
            return INTERRUPTED_EXIT_CODE
        if isinstance(error, (SystemExit, BrokenPipeError)):  # nobody reads what is printed
            _silence(sys.stdout)
            return MeshinferError.exit_code
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            _silence(sys.stdout)
            return self._say(f"cannot write the output: {error.strerror}")
        if self._debug:
            traceback.print_exception(error)
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            click.echo(error.format_message())
            return error.exit_code
        if isinstance(error, click.ClickException):
            command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "meshinfer"
            return self._say(f"{error.format_message().rstrip('.')} (see: {command} --help)", error.exit_code)
        if isinstance(error, MeshinferError):
            return self._say(str(error), error.exit_code)
        return self._say(f"unexpected {type(error).__name__}: {error} (a fault of meshinfer; --debug shows where)")

    @staticmethod
    def _say(message: str, exit_code: int = MeshinferError.exit_code) -> int:
        click.echo(f"error: {' '.join(message.split())}", err=True)
        return exit_code


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


def _silence(stream: IO[str]) -> None:
    """Let what is still to be written go nowhere: at its exit Python would try again, and complain."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
