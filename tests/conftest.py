"""Settings of all tests, and models that many of them use."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from meshinfer.config import Folders

# A busy machine is slow now and then; that is no failure.
settings.register_profile("meshinfer", deadline=None)
settings.load_profile("meshinfer")


@pytest.fixture(scope="session")
def smollm2_home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A home that holds smollm2-135m. For reading only: a test that changes something takes a copy (`copy_home`).

    What had to be downloaded is kept in pytest's cache; its hash is checked before it is used again.
    """
    from meshinfer.models.add import add_model
    from meshinfer.shards.store import Store

    assert request.config.cache is not None
    kept = request.config.cache.mkdir("smollm2-135m")
    folders = Folders(tmp_path_factory.mktemp("smollm2-home"))
    shutil.copytree(kept, folders.downloads, copy_function=_link_or_copy)
    add_model(Store(folders), "smollm2-135m")
    for path in folders.downloads.iterdir():
        if not (kept / path.name).exists():
            _link_or_copy(path, kept / path.name)
    return folders


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A home that holds `tiny`, a random model of two layers, made from `tiny.gguf` beside it. For reading only."""
    from meshinfer.models.add import add_model
    from meshinfer.shards.store import Store
    from tests.sources.makers import make_gguf

    folder = tmp_path_factory.mktemp("tiny")
    folders = Folders(folder / "home")
    add_model(Store(folders), str(make_gguf(folder / "tiny.gguf")))
    return folders


@pytest.fixture
def copy_home(tmp_path: Path) -> Callable[[Folders], Folders]:
    """Makes a copy of a home that the test may change."""

    def copy(folders: Folders) -> Folders:
        return Folders(Path(shutil.copytree(folders.home, tmp_path / "copied-home")))

    return copy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes an empty disk of so many MB, where the test may mount one."""
    if os.name == "nt" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root on Linux")
    with ExitStack() as mounted:

        def make(size_mb: int) -> Path:
            folder = tmp_path / f"disk{size_mb}"
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", folder]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                pytest.skip(f"cannot mount a small disk: {result.stderr.strip()}")
            mounted.callback(subprocess.run, ["umount", folder], check=True)
            return folder

        yield make


def _link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
