"""What a SOURCE string names: an alias, a file, a folder or a Hugging Face repository.

`look` touches the disk, `decide` is pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshinfer.errors import SourceError

IR_GRAPH, IR_WEIGHTS = "openvino_model.xml", "openvino_model.bin"
CONFIG = "config.json"

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,199}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AliasSource:
    """A model known by a short name."""

    name: str


@dataclass(frozen=True, slots=True)
class GgufSource:
    """One `.gguf` file."""

    path: Path


@dataclass(frozen=True, slots=True)
class IrSource:
    """A folder that holds an OpenVINO IR."""

    folder: Path


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A folder that holds a Hugging Face checkpoint."""

    folder: Path


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hugging Face hub; what it holds is known only when it is asked."""

    repo: str
    revision: str


Source = AliasSource | GgufSource | IrSource | CheckpointSource | HubSource


@dataclass(frozen=True, slots=True)
class Seen:
    """What the disk has under the name of a source."""

    path: Path
    kind: Literal["nothing", "file", "folder"]
    names: frozenset[str] = frozenset()
    """Names of the files in a folder."""


def look(source: str) -> Seen:
    """What the disk has under this name."""
    try:
        source.encode()
        if not source:
            raise ValueError("it is empty")
        path = Path(source).expanduser().absolute()
        if path.is_dir():
            return Seen(path, "folder", frozenset(entry.name for entry in path.iterdir() if entry.is_file()))
        return Seen(path, "file" if path.is_file() else "nothing")
    except (OSError, ValueError, RuntimeError) as error:  # the last for a ~user that is none
        raise SourceError(f"cannot look at {source!r}: {error}") from error


def decide(source: str, seen: Seen, aliases: Collection[str]) -> Source:
    """What `source` names. A file or folder of that name wins over a repository. Raises SourceError."""
    if source in aliases and seen.kind == "nothing":
        return AliasSource(source)
    if seen.kind == "file":
        if seen.path.suffix.lower() == ".gguf":
            return GgufSource(seen.path)
        if seen.path.name == IR_GRAPH:
            raise SourceError(f"{source} is one file of a model: give its folder, {seen.path.parent}")
        raise SourceError(f"{source} is a file, but not a .gguf file; {accepted(aliases)}")
    if seen.kind == "folder":
        return _folder(source, seen, aliases)
    repo, has_revision, revision = source.partition("@")
    if _REPO.fullmatch(repo) and not _is_path(source):
        if has_revision and not _REVISION.fullmatch(revision):
            raise SourceError(f"'{revision}' after @ is no revision: give a branch, a tag or a commit")
        return HubSource(repo, revision or "main")
    if _is_path(source):
        raise SourceError(f"no such file or folder: {seen.path}")
    raise SourceError(f"unknown model source '{source}'; {accepted(aliases)}")


def is_checkpoint(names: Iterable[str]) -> bool:
    """Whether these file names make a Hugging Face checkpoint."""
    names = set(names)
    return CONFIG in names and any(map(is_weights, names))


def is_weights(name: str) -> bool:
    """Whether this file holds weights as transformers names them, in the root of a folder or repository."""
    if "/" in name or "\\" in name:
        return False
    if name.endswith(".safetensors"):
        return name.startswith("model")
    return name.startswith("pytorch_model") and name.endswith(".bin")


def accepted(aliases: Iterable[str]) -> str:
    """What a source can be, as the end of an error message."""
    return (
        "a source is a .gguf file, a folder with an OpenVINO IR or a Hugging Face checkpoint, "
        f"a Hugging Face repository (org/name or org/name@revision), or one of: {', '.join(sorted(aliases))}"
    )


def _folder(source: str, seen: Seen, aliases: Collection[str]) -> Source:
    if IR_GRAPH in seen.names:
        return IrSource(seen.path)
    if is_checkpoint(seen.names):
        return CheckpointSource(seen.path)
    ggufs = sorted(name for name in seen.names if name.lower().endswith(".gguf"))
    if ggufs:
        raise SourceError(f"{source} is a folder with .gguf files: name one of them, such as {seen.path / ggufs[0]}")
    missing = "config.json but no weights" if CONFIG in seen.names else "neither openvino_model.xml nor config.json"
    raise SourceError(f"the folder {source} has {missing}; {accepted(aliases)}")


def _is_path(source: str) -> bool:
    return source.lower().endswith(".gguf") or source.startswith((".", "/", "~")) or "\\" in source or ":" in source
