"""The command line as a person meets it: help, exit codes, one line per error."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshinfer import __version__
from meshinfer.cli import main as module
from meshinfer.cli.main import COMMANDS, main
from meshinfer.config import Folders
from meshinfer.errors import InputError, VerificationError
from tests.signals import hear_control_c

HEAVY = ("torch", "transformers", "openvino", "openvino_genai", "optimum", "numpy", "rich")
HELP_LIMIT_S = 0.3


def python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "meshinfer", *arguments)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Put a function in the place of the `devices` command; returns a runner of it."""

    def install(function):
        fake = type("Module", (), {"command": click.command("devices")(function)})
        monkeypatch.setitem(sys.modules, "meshinfer.cli.devices", fake)
        return lambda *options: CliRunner().invoke(main, [*options, "devices"])

    return install


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0 and result.stderr == ""
    for name, line in COMMANDS.items():
        assert f"  {name}" in result.stdout and line in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_table_exists(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"Usage: main {name}")


def test_help_is_fast() -> None:
    def best_s(*arguments: str) -> float:
        def once() -> float:
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - began

        return min(once() for _ in range(7))

    bare_s = best_s("-c", "import click")
    assert best_s("-m", "meshinfer", "--help") - bare_s < HELP_LIMIT_S - 0.1


@pytest.mark.parametrize("action", ["import meshinfer", "from meshinfer.cli.main import main; main(['--help'])"])
def test_nothing_heavy_is_imported(action: str) -> None:
    tell = "print(*sys.modules, file=sys.stderr)"
    code = f"import sys\ntry:\n    {action}\nexcept SystemExit:\n    pass\n{tell}"
    loaded = set(python("-c", code).stderr.split())
    assert "meshinfer" in loaded and not loaded & set(HEAVY)


def test_version() -> None:
    assert run("--version").stdout.strip() == f"meshinfer, version {__version__}"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("fly")
    assert result.returncode == 2 and "No such command 'fly'" in result.stderr


def test_errors_are_one_line_with_their_exit_code(command) -> None:
    def bad_input() -> None:
        raise InputError("two\n  lines")

    def bad_result() -> None:
        raise VerificationError("differs")

    result = command(bad_input)()
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: two lines\n")
    result = command(bad_result)()
    assert (result.exit_code, result.stderr) == (1, "error: differs\n")


def test_a_fault_of_ours_is_one_line_too_and_debug_shows_where(command) -> None:
    def broken() -> None:
        raise KeyError("lost")

    result = command(broken)()
    assert result.exit_code == 1
    assert result.stderr == "error: unexpected KeyError: 'lost' (a fault of meshinfer; --debug shows where)\n"
    result = command(broken)("--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr and "in broken" in result.stderr and "error: unexpected" in result.stderr


def test_an_exit_code_of_a_command_is_kept(command) -> None:
    def leaves() -> None:
        raise click.exceptions.Exit(7)

    assert command(leaves)().exit_code == 7


def test_home_reaches_the_command(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Folders] = []

    @click.pass_obj
    def look(folders: Folders) -> None:
        seen.append(folders)

    monkeypatch.setenv("MESHINFER_HOME", str(tmp_path / "from-environment"))
    assert command(look)("--home", str(tmp_path / "given")).exit_code == 0
    assert command(look)().exit_code == 0
    assert [folders.home.name for folders in seen] == ["given", "from-environment"]


def test_control_c_is_quiet_and_130(command) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    result = command(interrupted)()
    assert result.exit_code == 130 and "Traceback" not in result.output


@pytest.mark.skipif(os.name == "nt", reason="a process alone cannot be sent Ctrl-C on Windows")
def test_control_c_in_a_real_process() -> None:
    code = (
        "import sys, threading, types, click\n"
        "@click.command()\n"
        "def command():\n"
        "    print('ready', flush=True)\n"
        "    threading.Event().wait(60)\n"
        "sys.modules['meshinfer.cli.devices'] = types.SimpleNamespace(command=command)\n"
        "from meshinfer.cli.main import main\n"
        "main(['devices'])\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], preexec_fn=hear_control_c, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.strip() == ""


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe looks different on Windows")
def test_a_reader_that_goes_away_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "meshinfer", "devices", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(60)
    process.stderr.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "Missing argument 'MODEL' (see: meshinfer run --help)"),
        (["run", "x", "hi", "--threads", "0"], "'--threads': 0 is not in the range 1<=x<=1024 (see: meshinfer run"),
        (["run", "x", "hi", "--kv", "foo"], "'foo' is not one of 'paged', 'stateful' (see: meshinfer run --help)"),
        (["--bogus"], "No such option '--bogus' (see: meshinfer --help)"),
        (["nonesuch"], "No such command 'nonesuch' (see: meshinfer --help)"),
        (["model", "add", ""], "cannot look at '': it is empty"),
        (["--home", "~nobody-of-that-name/x", "model", "list"], "cannot be the folder for models"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_line(words: list[str], said: str) -> None:
    result = run(*words)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and said in line


def test_without_a_command_there_is_help() -> None:
    assert run().stdout == run("--help").stdout and "Commands:" in run().stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["devices"], ["devices", "--json"], ["run", "--help"]])
def test_output_that_cannot_be_written_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "meshinfer", *words]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX closes descriptors")
@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_closed_streams_are_no_fault_of_ours(closed: str) -> None:
    line = f"{sys.executable} -m meshinfer run nonesuch {closed}"
    result = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert result.returncode in (1, 2) and "unexpected" not in result.stderr and "Traceback" not in result.stderr


def test_a_character_the_terminal_lacks_becomes_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    module._make_printable(stream)
    stream.write("é\udc80")
    stream.flush()
    assert stream.buffer.getvalue() == b"??"
    monkeypatch.setattr(module, "os", type("Windows", (), {"name": "nt"}))
    piped = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    module._make_printable(piped)
    piped.write("数")
    piped.flush()
    assert piped.buffer.getvalue() == "数".encode()
    module._make_printable(None)


def test_devices_as_a_table_and_as_json() -> None:
    table = run("devices")
    assert table.returncode == 0 and "CPU" in table.stdout and table.stderr == ""
    listed = json.loads(run("devices", "--json").stdout)
    assert listed["found"][0]["name"] == "CPU" and listed["found"][0]["total_memory_bytes"] > 0
    assert {item["kind"] for item in listed["found"] + listed["absent"]} == {"CPU", "GPU", "NPU"}
    for absence in listed["absent"]:
        assert f"no {absence['kind']}: {absence['reason']}" in table.stdout
