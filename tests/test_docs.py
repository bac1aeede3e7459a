"""What the documents tell a reader to type exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshinfer.cli.main import main
from tests.tree import ROOT
from tools.readme_command import marked_block

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
PROGRAM = re.compile(r"(?:.*[/\\])?meshinfer(?:\.exe)?")


def command_lines(text: str) -> list[list[str]]:
    """Every call of meshinfer in the code of a document, as words without the program."""
    blocks = [line for language, body in FENCE.findall(text) if language for line in body.splitlines()]
    calls = []
    for line in [*blocks, *SPAN.findall(FENCE.sub("", text))]:
        for part in re.split(r"&&|\|\||[|;]", line.replace("\\", "/")):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue
            if words and PROGRAM.fullmatch(words[0]):
                calls.append(words[1:])
            elif words[1:3] == ["-m", "meshinfer"]:
                calls.append(words[3:])
    return calls


def wrong(words: list[str], command: click.Command = main, path: tuple[str, ...] = ()) -> str:
    """What is wrong with a call: a command or an option that does not exist. Empty if nothing is."""
    context = click.Context(command, info_name="meshinfer")
    options = {
        name: option for option in command.get_params(context) for name in [*option.opts, *option.secondary_opts]
    }
    words = list(words)
    while words:
        word = words.pop(0)
        name, has_value, _ = word.partition("=")
        if name.startswith("-") and name.strip("-.") != "":
            if name not in options:
                return f"{' '.join(('meshinfer', *path))} has no option {name}"
            option = options[name]
            if isinstance(option, click.Option) and not (option.is_flag or option.count or has_value):
                words = words[option.nargs :]
        elif isinstance(command, click.Group):
            inner = command.get_command(context, word)
            return wrong(words, inner, (*path, word)) if inner else f"{' '.join(('meshinfer', *path))} has no {word}"
    result = CliRunner().invoke(main, [*path, "--help"])
    return "" if result.exit_code == 0 else f"{path} --help: {result.output}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_the_documents_exists(document: Path) -> None:
    calls = command_lines(document.read_text("utf-8"))
    assert [problem for call in calls if (problem := wrong(call))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_in_the_documents_leads_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text("utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.skipif(shutil.which("bash") is None or os.name == "nt", reason="needs bash")
def test_the_shell_commands_of_the_readme_parse() -> None:
    blocks = [body for language, body in FENCE.findall((ROOT / "README.md").read_text("utf-8")) if language == "sh"]
    assert len(blocks) >= 2
    for body in blocks:
        assert subprocess.run(["bash", "-n"], input=body, text=True, capture_output=True).stderr == ""


def test_the_readme_has_its_two_commands_on_one_line_each() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert marked_block(text, "test").count("\n") == 0 and "-m pytest" in marked_block(text, "test")
    first = marked_block(text, "run")
    assert first.count("\n") == 0
    assert command_lines(f"```sh\n{first}\n```\n") == [["demo"]]


def test_every_command_is_in_the_readme() -> None:
    called = {call[0] for call in command_lines((ROOT / "README.md").read_text("utf-8")) if call}
    assert set(main.list_commands(click.Context(main))) <= called


def test_the_checkers_find_what_they_are_for() -> None:
    text = (
        "Run `meshinfer devices --json`; `meshinfer` is a word, `x = 1` is code.\n"
        "```sh\n.venv/bin/meshinfer --home /x devices  # a comment --nope\npython -m meshinfer fly && ls\n```\n"
        "```\nmeshinfer in a picture\n```\n"
    )
    assert command_lines(text) == [["--home", "/x", "devices"], ["fly"], ["devices", "--json"], []]
    assert wrong(["devices", "--json"]) == wrong(["--home", "/x", "devices"]) == wrong(["--home=/x"]) == wrong([]) == ""
    assert wrong(["fly"]) == "meshinfer has no fly"
    assert wrong(["devices", "--xml"]) == "meshinfer devices has no option --xml"
    assert wrong(["--nope", "devices"]) == "meshinfer has no option --nope"
    assert LINK.findall("[a](b/c.md) [d](http://e) [f](#g) [h](i.md#j)") == ["b/c.md", "i.md"]
    with pytest.raises(ValueError, match="0 blocks"):
        marked_block("```sh\nls\n```", "test")
