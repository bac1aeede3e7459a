"""Decide in plain objects, act in a thin shell: who may touch the world, and who may import whom."""

from __future__ import annotations

import ast
import graphlib

import pytest

from tests.tree import imported, inner_imports, module_name, sources

_WORLD_MODULES = """
aiohttp asyncio click concurrent ctypes datetime fcntl filelock getpass glob http httpx huggingface_hub importlib
io multiprocessing nncf openvino openvino_genai openvino_tokenizers optimum os pathlib platformdirs psutil random rich
secrets selectors shutil signal socket socketserver ssl subprocess sys tempfile threading time tokenizers torch
traceback transformers urllib uuid webbrowser winreg zeroconf zipfile
"""
WORLD_MODULES = frozenset(_WORLD_MODULES.split())
"""Clock, files, network, processes, threads, terminal, unseeded randomness, inference."""

HARMLESS = frozenset({"urllib.parse", "pathlib.PurePath", "pathlib.PurePosixPath"})
WORLD_CALLS = frozenset({"open", "input", "print", "exec", "eval", "breakpoint", "__import__"})
SEEDED = frozenset({"default_rng", "Generator", "SeedSequence", "PCG64", "Philox"})

WORLD = {
    "__main__.py": "is the command line",
    "api/handlers.py": "network, clock, randomness",
    "api/server.py": "network, randomness",
    "bench/clock.py": "clock",
    "bench/genai.py": "OpenVINO inference",
    "bench/lab.py": "processes, hosts",
    "bench/load.py": "network, clock, terminal",
    "bench/ring.py": "processes, files, clock",
    "bench/unsplit.py": "runs stages, terminal",
    "bench/stage.py": "runs stages",
    "cli/bench.py": "terminal, clock",
    "cli/config.py": "terminal",
    "cli/devices.py": "terminal",
    "cli/main.py": "terminal",
    "cli/model.py": "terminal",
    "cli/options.py": "terminal",
    "cli/run.py": "terminal",
    "cli/show.py": "terminal",
    "config.py": "environment, config file",
    "discovery/interfaces.py": "network interfaces",
    "discovery/mdns.py": "network, clock",
    "engine/assemble.py": "OpenVINO graphs",
    "engine/calibrate.py": "OpenVINO inference, clock, files",
    "engine/devices.py": "OpenVINO, memory of the machine",
    "engine/generate.py": "runs stages",
    "engine/golden.py": "runs stages, files",
    "engine/inference.py": "OpenVINO inference",
    "engine/paged.py": "OpenVINO inference",
    "engine/pipeline.py": "runs stages",
    "engine/selfcheck.py": "runs stages",
    "engine/stage.py": "OpenVINO compilation",
    "engine/stateful.py": "OpenVINO inference",
    "engine/stateless.py": "OpenVINO inference",
    "engine/unsplit.py": "OpenVINO inference",
    "files/disk.py": "files",
    "files/hashing.py": "files",
    "files/work.py": "files, locks",
    "agent/admin.py": "HTTP",
    "agent/agent.py": "event loop, clock, threads",
    "agent/capacity.py": "memory of the machine, OpenVINO",
    "agent/exchange.py": "event loop, threads",
    "agent/models.py": "files, threads",
    "agent/origin.py": "event loop, threads",
    "agent/report.py": "clock",
    "agent/runtime.py": "files, locks, randomness",
    "agent/service.py": "event loop, network, randomness",
    "agent/signals.py": "signals",
    "agent/stages.py": "threads, clock, OpenVINO",
    "cli/answers.py": "terminal, clock",
    "cli/ask.py": "terminal",
    "cli/chat.py": "terminal",
    "cli/client.py": "network, clock",
    "cli/demo.py": "terminal, clock",
    "cli/down.py": "terminal",
    "cli/lifeline.py": "processes, threads, signals",
    "cli/local_mesh.py": "processes, files, clock",
    "cli/panel.py": "terminal, clock",
    "cli/peers.py": "terminal",
    "cli/plan.py": "terminal",
    "cli/processes.py": "processes, clock",
    "cli/status.py": "terminal",
    "cli/up.py": "terminal",
    "cli/use.py": "terminal, clock",
    "transfer/fetch.py": "event loop, files, threads, clock, randomness",
    "transfer/give.py": "event loop, files, threads",
    "links/dial.py": "network",
    "links/greet.py": "network, clock",
    "links/link.py": "network",
    "links/links.py": "network, clock, randomness",
    "links/listen.py": "network",
    "models/add.py": "files",
    "models/chat.py": "runs stages",
    "models/check.py": "files, runs stages",
    "models/verify.py": "runs stages",
    "ring/runner.py": "clock, threads",
    "ring/work.py": "clock",
    "security/certificates.py": "cryptography",
    "security/identity.py": "files, TLS, randomness",
    "shards/compose.py": "OpenVINO graphs",
    "shards/cut.py": "OpenVINO graphs",
    "shards/dims.py": "OpenVINO graphs",
    "shards/ports.py": "OpenVINO graphs",
    "shards/reorder.py": "OpenVINO graphs",
    "shards/rows.py": "OpenVINO graphs",
    "shards/lend.py": "files",
    "shards/store.py": "files, locks",
    "shards/write.py": "OpenVINO graphs, files",
    "sources/aliases.py": "files, processes",
    "sources/child.py": "OpenVINO and PyTorch, in a process of its own",
    "sources/convert.py": "files, processes",
    "sources/folder.py": "files",
    "sources/gguf.py": "files",
    "sources/gguf_tokenizer.py": "files",
    "sources/hub.py": "network, files",
    "sources/ir.py": "files",
    "sources/resume.py": "network, clock, files",
    "sources/source.py": "files",
    "sources/zero_points.py": "OpenVINO graphs, files",
    "text/template.py": "Jinja templates",
    "text/tokenizer.py": "OpenVINO tokenizers",
}
"""The shell: these touch the world, and this is what of it. Every other module is pure."""

BASE = {"types", "errors", "settings", "config"}
ALLOWED = {
    "types": set(),
    "errors": set(),
    "settings": {"errors"},
    "config": {"errors", "settings"},
    "discovery": BASE,
    "membership": BASE,
    "planning": BASE,
    "wire": BASE | {"membership.events", "planning.plan"},
    "negotiation": BASE | {"planning", "shards.manifest", "wire.messages"},
    "ring": BASE | {"engine.blocks", "engine.sampling", "engine.step", "planning.plan", "wire"},
    "transfer": BASE | {"files", "shards.manifest", "shards.store", "wire.messages"},
    "agent": BASE
    | {"api", "discovery", "engine", "files", "links", "membership", "models", "negotiation", "planning", "ring"}
    | {"security", "settings", "shards", "text", "transfer", "wire"},
    "links": BASE | {"membership", "security", "wire"},
    "security": BASE | {"files"},
    "text": BASE | {"files"},
    "files": BASE,
    "sources": BASE | {"files"},
    "shards": BASE | {"files"},
    "engine": BASE | {"files.disk", "shards.compose", "shards.manifest", "shards.ports", "shards.store"},
    "api": BASE | {"engine.sampling", "text"},
    "models": BASE | {"engine", "files", "shards", "sources", "text"},
    "bench": BASE | {"engine", "files", "models", "shards"},
    "cli": BASE
    | {"agent", "bench", "engine", "files", "models", "negotiation.problem", "planning", "shards", "sources", "text"}
    | {"wire.messages"},
    "__main__": {"cli"},
}
"""What the modules of a package may import besides their own package: whole packages, or single modules."""


def impurities(source: str, path: str) -> list[str]:
    """What in a module touches the world: imports (but those for type checkers), calls, unseeded randomness."""
    found = []
    for name in sorted(imported(source, path, types_too=False)):
        harmless = any(f"{name}.".startswith(f"{other}.") for other in HARMLESS)
        if name.split(".")[0] in WORLD_MODULES and not harmless:
            found.append(f"imports {name}")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in WORLD_CALLS:
            found.append(f"calls {called}()")
        *module, last = called.split(".")
        seeded = last in SEEDED and bool(node.args or node.keywords)
        if module[-1:] == ["random"] and not seeded:
            found.append(f"calls {called}() without a seed")
    return found


def touched(path: str, source: str, known: dict[str, str]) -> list[str]:
    """What a pure module must not have: its own impurities, and imports of modules that touch the world."""
    names = {module_name(other): other for other in known}
    inner = inner_imports(source, path, set(names), types_too=False)
    return impurities(source, path) + [
        f"imports {name}, which touches the world" for name in inner if names[name] in WORLD
    ]


def forbidden(path: str, source: str, known: set[str]) -> list[str]:
    """Imports that go the wrong way between packages."""
    package = module_name(path).split(".")[0]
    allowed = ALLOWED.get(package, set()) | {package, ""}

    def fits(name: str) -> bool:
        return any(name == target or name.startswith(f"{target}.") for target in allowed if target) or name == ""

    return sorted(name for name in inner_imports(source, path, known) if not fits(name))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


MODULES = sources()
KNOWN = {module_name(path) for path in MODULES}
PACKAGES = {name.split(".")[0] for name in KNOWN if name}


@pytest.mark.parametrize("path", sorted(set(MODULES) - set(WORLD)))
def test_modules_that_are_not_of_the_shell_are_pure(path: str) -> None:
    assert touched(path, MODULES[path], MODULES) == []


@pytest.mark.parametrize("path", sorted(set(MODULES) & set(WORLD)))
def test_the_list_of_the_shell_names_nothing_pure(path: str) -> None:
    inner = inner_imports(MODULES[path], path, KNOWN, types_too=False)
    shell = {module_name(other) for other in WORLD}
    assert impurities(MODULES[path], path) or inner & shell, f"{path} is pure: take it off the list"


def test_the_list_of_the_shell_names_nothing_that_is_gone() -> None:
    assert sorted(set(WORLD) - set(MODULES)) == []


@pytest.mark.parametrize("path", sorted(MODULES))
def test_imports_go_one_way_between_packages(path: str) -> None:
    assert forbidden(path, MODULES[path], KNOWN) == []


def test_every_package_has_its_line_in_the_table() -> None:
    assert sorted(PACKAGES - set(ALLOWED)) == []


def test_no_module_imports_itself_round_a_corner() -> None:
    assert cycle({module_name(path): inner_imports(source, path, KNOWN) for path, source in MODULES.items()}) == []


# --- the checkers themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("import pathlib\nfrom pathlib import PurePath", "imports pathlib"),
        ("import time", "imports time"),
        ("import os.path as p", "imports os.path"),
        ("from pathlib import Path", "imports pathlib.Path"),
        ("import openvino as ov", "imports openvino"),
        ("def f():\n    from asyncio import sleep", "imports asyncio.sleep"),
        ("if True:\n    import socket", "imports socket"),
        ("open('x')", "calls open()"),
        ("print('x')", "calls print()"),
        ("np.random.rand(3)", "calls np.random.rand() without a seed"),
        ("np.random.default_rng()", "calls np.random.default_rng() without a seed"),
    ],
)
def test_what_touches_the_world_is_found(line: str, complaint: str) -> None:
    assert complaint in impurities(line, "engine/blocks.py")


@pytest.mark.parametrize(
    "line",
    [
        "import json, hashlib, numpy",
        "from pathlib import PurePath",
        "from urllib.parse import urlsplit",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pathlib import Path\n    import openvino",
        "np.random.default_rng(7)",
        "np.random.Generator(np.random.Philox(key=[1, 2])).random()",
        "shard.open()",
        "from meshinfer.types import Sha256",
    ],
)
def test_what_is_pure_is_left_alone(line: str) -> None:
    assert impurities(line, "engine/blocks.py") == []


def test_a_pure_module_may_not_lean_on_the_shell() -> None:
    known = {"engine/blocks.py": "", "shards/store.py": "", "shards/manifest.py": ""}
    complaints = touched("engine/blocks.py", "def f():\n    from meshinfer.shards import store", known)
    assert complaints == ["imports shards.store, which touches the world"]
    assert touched("engine/blocks.py", "from meshinfer.shards.manifest import Manifest", known) == []


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        ("shards/store.py", "from meshinfer.engine.stage import Stage", ["engine.stage"]),
        ("shards/store.py", "def f():\n    from meshinfer.engine import stage", ["engine.stage"]),
        ("shards/store.py", "from ..engine import stage", ["engine.stage"]),
        ("files/work.py", "from . import disk\nfrom .disk import replace", []),
        ("files/disk.py", "from meshinfer.shards.cut import Cutter", ["shards.cut"]),
        ("engine/stage.py", "from meshinfer.shards.cut import Cutter", ["shards.cut"]),
        ("engine/stage.py", "from meshinfer.shards.manifest import Manifest", []),
        ("errors.py", "import meshinfer.types", ["types"]),
        ("text/tokenizer.py", "import meshinfer.cli.main", ["cli.main"]),
        ("new/thing.py", "import meshinfer.errors", ["errors"]),
    ],
)
def test_imports_in_the_wrong_direction_are_found(path: str, line: str, wrong: list[str]) -> None:
    known = {"engine.stage", "shards.cut", "files.disk", "shards.manifest", "types", "errors", "cli.main"}
    assert forbidden(path, line, known) == wrong


def test_circles_are_found() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert cycle({"a": {"b"}, "b": {"c"}}) == []
