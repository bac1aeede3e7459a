"""From a SOURCE to a folder with an OpenVINO IR, by the cheapest road."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import meshinfer
from meshinfer.config import Folders
from meshinfer.errors import InputError, MissingExtraError, NoSpaceError, SourceError
from meshinfer.files import disk
from meshinfer.files.hashing import sha256_file, sha256_files
from meshinfer.files.progress import Progress, silent
from meshinfer.files.work import work_folder
from meshinfer.sources import folder as facts
from meshinfer.sources import gguf, hub
from meshinfer.sources.aliases import ALIASES, fetch_alias
from meshinfer.sources.folder import ModelFolder
from meshinfer.sources.gguf_tokenizer import build_tokenizer, write_tokenizer
from meshinfer.sources.ir import check_ir
from meshinfer.sources.source import (
    CONFIG,
    IR_GRAPH,
    IR_WEIGHTS,
    AliasSource,
    CheckpointSource,
    GgufSource,
    HubSource,
    IrSource,
    decide,
    is_weights,
    look,
)

DEFAULT_BITS = 4
_LABELS = {4: "int4", 8: "int8", 16: "f16", 32: "f32"}
_SPARE_BYTES = 64 << 20
_LEAST_FREE_BYTES = 1 << 20
"""With less on the disk after a conversion failed, that is why."""


@contextmanager
def prepare(
    source: str, folders: Folders, *, bits: int | None = None, progress: Progress = silent, endpoint: str | None = None
) -> Iterator[ModelFolder]:
    """The model that `source` names as an OpenVINO IR; what had to be made for it is removed after the block.

    `bits` (4, 8, 16 or 32) is what a checkpoint's weights are exported to, 4 where None. `endpoint` is the model
    hub, huggingface_hub's own where None. Raises InputError and its kinds: SourceError, MissingExtraError,
    NoSpaceError, CorruptFileError.
    """
    if bits is not None and bits not in _LABELS:
        raise InputError(f"bits must be one of {', '.join(map(str, _LABELS))}, not {bits}")
    job = _Job(source, folders, bits, progress)
    match decide(source, look(source), ALIASES):
        case AliasSource(name):
            _check_bits(job, ALIASES[name].precision)
            making = _from_gguf(job, fetch_alias(ALIASES[name], folders, progress))
        case GgufSource(path):
            making = _from_gguf(job, path)
        case IrSource(folder):
            making = _from_ir(job, folder, None)
        case CheckpointSource(folder):
            making = _from_checkpoint(job, folder, None)
        case HubSource(repo, revision):
            making = _from_hub(job, repo, revision, endpoint)
    with making as model:
        yield model


@dataclass(frozen=True, slots=True)
class _Job:
    source: str
    folders: Folders
    bits: int | None
    progress: Progress


@contextmanager
def _from_gguf(job: _Job, path: Path) -> Iterator[ModelFolder]:
    header = gguf.read_file(path)
    gguf.check_supported(header, path.name)
    tokenizer = build_tokenizer(header, path.name)
    _check_bits(job, header.precision)
    with work_folder(job.folders) as work:
        needed = 2 * header.converted_bytes + _SPARE_BYTES  # as the reader makes it, and mended
        disk.require_space(work, needed)
        _place(path, work / "model.gguf", job.folders)
        job.progress("convert", 0, 0)
        _run_child(["gguf", str(work / "model.gguf")], work, path.name, needed)
        job.progress("convert", 1, 1)
        check_ir(work)
        write_tokenizer(tokenizer, header, work)
        yield ModelFolder(
            folder=work,
            source=job.source,
            revision=sha256_file(path, job.progress),
            precision=header.precision,
            context_tokens=header.context_tokens,
            generation={"eos_token_id": header.eos_ids},
            chat_template=header.chat_template,
            tokenizer_files=facts.tokenizer_files(work),
        )


@contextmanager
def _from_ir(job: _Job, folder: Path, commit: str | None) -> Iterator[ModelFolder]:
    graph = check_ir(folder)
    _check_bits(job, graph.precision)
    revision = commit or sha256_files((folder / IR_GRAPH, folder / IR_WEIGHTS), job.progress)
    yield _describe(job, folder, folder, revision, graph.precision)


@contextmanager
def _from_checkpoint(job: _Job, folder: Path, commit: str | None) -> Iterator[ModelFolder]:
    facts.check_config(facts.read_json(folder / CONFIG), str(folder))
    facts.check_tokenizer_source(folder)
    _demand_export()
    bits = job.bits or DEFAULT_BITS
    weights = sorted(path for path in folder.iterdir() if is_weights(path.name))
    with work_folder(job.folders) as work:
        size = sum(path.stat().st_size for path in weights)
        needed = export_bytes(size, bits)
        disk.require_space(work, needed)
        output = work / "ir"
        job.progress("convert", 0, 0)
        _run_child(["checkpoint", str(folder), str(output), str(bits)], work, folder.name, needed)
        job.progress("convert", 1, 1)
        check_ir(output)
        revision = commit or sha256_files([folder / CONFIG, *weights], job.progress)
        tokenizer = folder if (folder / "tokenizer.json").is_file() else output
        yield replace(
            _describe(job, output, folder, revision, _LABELS[bits]),
            tokenizer_files=facts.tokenizer_files(tokenizer),
            bits=bits,
        )


@contextmanager
def _from_hub(job: _Job, repo: str, revision: str, endpoint: str | None) -> Iterator[ModelFolder]:
    listing = hub.list_repo(repo, revision, endpoint)
    if listing.kind == "checkpoint":
        _demand_export()
    folder = hub.download(listing, job.folders, job.progress, endpoint)
    road = _from_ir if listing.kind == "ir" else _from_checkpoint
    with road(job, folder, listing.commit) as model:
        yield model


def _describe(job: _Job, folder: Path, origin: Path, revision: str, precision: str) -> ModelFolder:
    return ModelFolder(
        folder=folder,
        source=job.source,
        revision=revision,
        precision=precision,
        context_tokens=facts.context_tokens(origin),
        generation=facts.generation_defaults(origin),
        chat_template=facts.chat_template(origin),
        tokenizer_files=facts.tokenizer_files(origin),
    )


def export_bytes(checkpoint_bytes: int, bits: int) -> int:
    """Disk that an export needs at its peak, in bytes, whatever the checkpoint's own precision."""
    factor = {4: 1.5, 8: 1.5, 16: 1.0, 32: 2.0}[bits]  # 4 and 8 bits are made from a whole 16- or 32-bit IR
    return int(checkpoint_bytes * factor) + _SPARE_BYTES


def _bits_of(precision: str) -> int | None:
    label = precision.replace("_", "")
    widths = {"int4": 4, "q4": 4, "int8": 8, "q8": 8, "f16": 16, "bf16": 16, "f32": 32}
    return next((bits for start, bits in widths.items() if label.startswith(start)), None)


def _check_bits(job: _Job, precision: str) -> None:
    if job.bits is not None and job.bits != _bits_of(precision):
        raise InputError(f"{job.source} already is {precision}: bits applies to Hugging Face checkpoints only")


def _demand_export() -> None:
    for package in ("torch", "nncf", "optimum"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("converting a Hugging Face checkpoint", "export")
    if importlib.util.find_spec("optimum.intel") is None:
        raise MissingExtraError("converting a Hugging Face checkpoint", "export")


def _place(source: Path, target: Path, folders: Folders) -> None:
    """Give a file a second name without touching its folder: a link where the disk can, else a copy."""
    for link in (os.link, os.symlink):
        try:
            link(source, target)
            return
        except OSError:
            continue
    disk.require_space(folders.work, source.stat().st_size)
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise SourceError(f"cannot copy {source} to {target.parent}: {error.strerror or error}") from error


def _run_child(arguments: list[str], work: Path, name: str, needed_bytes: int) -> None:
    """Run a conversion in its own process; its failure or crash becomes one SourceError, or NoSpaceError."""
    report, log = work / "error.json", work / "log.txt"
    temporary = work / "tmp"
    with disk.converted(work):
        temporary.mkdir()
        log.touch()
    package_root = str(Path(meshinfer.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        **{key: str(temporary) for key in ("TMPDIR", "TEMP", "TMP")},
    }
    command = [sys.executable, "-P", "-m", "meshinfer.sources.child", str(report), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if code:
        _blame_the_disk(work, needed_bytes)
        raise SourceError(f"{name} could not be converted: {_reason(report, log, code)}")


def _blame_the_disk(work: Path, needed_bytes: int) -> None:
    """Raise NoSpaceError where somebody took the space that was there, or more was needed than one could know."""
    free = disk.free_bytes(work)
    missing = needed_bytes - sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    if free < max(missing, _LEAST_FREE_BYTES):
        raise NoSpaceError(str(work), max(missing, _LEAST_FREE_BYTES), free)


def _reason(report: Path, log: Path, code: int) -> str:
    if report.exists():
        try:
            error: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return condense(error["text"]) or error["type"]
        except ValueError:  # the disk was full
            return "the converter could not even say why"
    if code < 0 or code > 255:
        return f"the converter crashed (exit code {code}); the file may be damaged or of an unsupported kind"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return condense(lines[-1]) if lines else f"the converter ended with exit code {code}"


def condense(text: str, limit: int = 300) -> str:
    """A third-party error in one line: without its source locations and empty lines."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    short = " ".join(kept or [line for line in lines if line])
    return short if len(short) <= limit else short[: limit - 3] + "..."
