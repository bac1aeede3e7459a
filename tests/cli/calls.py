"""Call the real command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from meshinfer.cli.show import LABELS
from meshinfer.config import Folders

Result = subprocess.CompletedProcess[str]


def command(folders: Folders, *arguments: str) -> list[str]:
    """The words of a call."""
    return [sys.executable, "-m", "meshinfer", "--home", str(folders.home), *arguments]


def meshinfer(folders: Folders, *arguments: str, stdin: str | bytes = b"") -> Result:
    """Run a command to its end; what it printed comes back as text."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(command(folders, *arguments), capture_output=True, input=data)
    return Result(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def succeeded(result: Result) -> str:
    """What a command that must not fail printed."""
    assert result.returncode == 0, result.stderr
    return result.stdout


def complaint(result: Result) -> str:
    """The one line that a refused command printed, and nothing else but how far it was."""
    assert result.returncode == 2 and result.stdout == "", result
    lines = [line for line in result.stderr.splitlines() if line not in LABELS.values()]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


def listing(folders: Folders) -> dict[str, int]:
    """Every file of a home with its size, but not the lock files, which are empty and stay."""
    files = (path for path in folders.home.rglob("*") if path.is_file() and folders.locks not in path.parents)
    return {path.relative_to(folders.home).as_posix(): path.stat().st_size for path in files}


def flip_byte(path: Path) -> None:
    """Change one byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
