"""Labs and meshes for tests, skipped with a reason where a lab cannot be."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshinfer.config import Folders
from tests.netlab.mesh import MESHES, Mesh
from tools.netlab import Netlab
from tools.netlab_system import NetlabError, require_tools

MakeLab = Callable[[int], Netlab]
MakeMesh = Callable[..., Mesh]
"""`(hosts, model_home=None)`: a mesh, none of whose nodes runs yet, in a lab of so many hosts."""


@pytest.fixture(scope="session")
def lab_works() -> None:
    """Skips where labs do not work."""
    try:
        require_tools()
    except NetlabError as error:
        pytest.skip(str(error))


@pytest.fixture
def make_lab(lab_works: None) -> Iterator[MakeLab]:
    """Makes labs of so many hosts that are gone after the test."""
    with ExitStack() as labs:
        yield lambda hosts: labs.enter_context(Netlab(hosts))


@pytest.fixture
def make_mesh(make_lab: MakeLab, tmp_path: Path) -> Iterator[MakeMesh]:
    """Makes meshes whose agents have ended after the test."""
    with ExitStack() as meshes:

        def make(hosts: int | Netlab, model_home: Folders | None = None, name: str = "mesh") -> Mesh:
            lab = hosts if isinstance(hosts, Netlab) else make_lab(hosts)
            return meshes.enter_context(Mesh(lab, tmp_path / name, model_home))

        yield make


@pytest.fixture(scope="session")
def office_home(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A home that holds `office`: a random model that is fast, and has 8 layers to be split and 4096 tokens of context.

    For reading only.
    """
    return random_model(tmp_path_factory, "office", "F16")


@pytest.fixture(scope="session")
def annex_home(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A home that holds `annex`, which is like `office` with other weights. For reading only."""
    return random_model(tmp_path_factory, "annex", "Q4_0")


def random_model(tmp_path_factory: pytest.TempPathFactory, name: str, weights: str) -> Folders:
    """A home with a random model of 8 layers."""
    from meshinfer.models.add import add_model
    from meshinfer.shards.store import Store
    from tests.sources.makers import make_gguf

    folder = tmp_path_factory.mktemp(name)
    folders = Folders(folder / "home")
    source = make_gguf(folder / f"{name}.gguf", weights=weights, layers=8, extra={"llama.context_length": 4096})
    add_model(Store(folders), str(source))
    return folders


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what the agents of its meshes said."""
    report = yield
    if report.failed:
        report.sections += [("agents", mesh.logs()) for mesh in MESHES]
    return report
