"""Exported models, kept in pytest's cache between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshinfer.config import Folders
from meshinfer.shards.store import Store
from tests.parity.families import exported


@pytest.fixture(scope="session")
def exports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where exported models are kept; a folder of this run where pytest keeps no cache."""
    cache = request.config.cache
    return cache.mkdir("exports") if cache is not None else tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="session")
def family_ir(exports: Path) -> Callable[[str], Path]:
    """The IR of a family by its name in `FAMILIES`."""
    return lambda name: exported(name, exports)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(Folders(tmp_path / "home"))
