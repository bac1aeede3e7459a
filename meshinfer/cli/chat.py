"""`meshinfer chat`: a conversation with the mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from meshinfer.cli.answers import answer_options, wait_until_ready
from meshinfer.config import Folders
from meshinfer.errors import InputError, MeshinferError

if TYPE_CHECKING:
    from meshinfer.cli.client import Client

HELP = """/reset  forget what was said
/quit   leave, as Ctrl-D does
/help   this
Ctrl-C  stop an answer; at the prompt, leave"""


@click.command("chat")
@click.option("--system", help="System message.")
@click.option("--stats", is_flag=True, help="Print the speed of each answer on stderr.")
@answer_options
@click.pass_obj
def command(folders: Folders, system: str | None, stats: bool, options: dict[str, Any], wait: float) -> None:
    """Talk with the mesh: each line is a turn, and what was said before is remembered.

    Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends. Lines may come through a pipe.
    """
    from meshinfer.cli.client import Client

    client = Client.of(folders)
    status = wait_until_ready(client, wait)
    talk = Talk(client, system, options, wait, stats)
    if not talk.by_hand:
        for line in _lines():
            if line.strip() == "/quit":
                return
            talk.turn(line)
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - lets lines be edited, where it exists
    click.echo(f"{status['model']} listens; /help says what else there is", err=True)
    while (typed := _typed()) is not None and typed.strip() != "/quit":
        talk.turn(typed)


class Talk:
    """What was said so far. `by_hand`: somebody types, and may stop answers and go on after errors."""

    def __init__(self, client: Client, system: str | None, options: dict[str, Any], wait: float, stats: bool) -> None:
        self._client, self._options, self._wait, self._stats = client, options, wait, stats
        self._first = [{"role": "system", "content": system}] if system else []
        self._said = list(self._first)
        self.by_hand = sys.stdin is not None and sys.stdin.isatty()

    def turn(self, line: str) -> None:
        """One line of the user: a command, or something to answer."""
        match line.strip():
            case "":
                return
            case "/help":
                click.echo(HELP)
            case "/reset":
                self._said = list(self._first)
                click.echo("what was said is forgotten", err=True)
            case word if word.startswith("/") and self.by_hand and word[1:].isalpha():
                click.echo(f"there is no {word}; there are /help, /reset and /quit", err=True)
            case text:
                self._ask(text)

    def _ask(self, text: str) -> None:
        from meshinfer.cli.client import TooLongError

        asked = [*self._said, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            self._answer(asked, pieces)
        except KeyboardInterrupt:
            if not self.by_hand:
                raise
            click.echo(" (stopped)")
        except MeshinferError as error:
            hint = "; /reset forgets what was said" if isinstance(error, TooLongError) else ""
            if not self.by_hand:
                raise
            if pieces:
                click.echo()
            click.echo(f"error: {error}{hint}", err=True)
        if pieces:
            self._said = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _answer(self, asked: list[dict[str, str]], pieces: list[str]) -> None:
        """Print an answer; what of it was printed is in `pieces` however this ends."""
        wait_until_ready(self._client, self._wait)
        with self._client.chat(asked, self._options) as answer:
            for piece in answer:
                pieces.append(piece)
                click.echo(piece, nl=False)
        click.echo()
        if self._stats:
            click.echo(str(answer), err=True)


def _typed() -> str | None:
    """The next line, or None where the user leaves."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


def _lines() -> Iterator[str]:
    """The lines on stdin as they come. Raises InputError."""
    for line in sys.stdin.buffer if sys.stdin is not None else ():
        try:
            yield line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"a line on stdin is not UTF-8 text: {error.reason} at byte {error.start}") from error
