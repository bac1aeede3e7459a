"""The modules of meshinfer as text, for the tests that look at the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "meshinfer"


def sources() -> dict[str, str]:
    """Every module's text by its path below meshinfer/, with "/" on every system."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def module_name(path: str) -> str:
    """`shards/store.py` is `shards.store`; `shards/__init__.py` is `shards`; the package's own is empty."""
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


def imported(source: str, path: str, types_too: bool = True) -> set[str]:
    """Everything `source` imports, at its top or inside functions: `os.path` for `import os.path`, `os.environ` for
    `from os import environ`.

    Without `types_too`, what only type checkers import is left out.
    """
    tree = ast.parse(source)
    skipped: set[ast.AST] = set()
    if not types_too:
        blocks = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        skipped = {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["meshinfer", *path.split("/")[:-1]]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def inner_imports(source: str, path: str, known: set[str], types_too: bool = True) -> set[str]:
    """The modules of meshinfer, of those `known`, that `source` imports; without "meshinfer." and without packages."""
    names = {name.removeprefix("meshinfer.") for name in imported(source, path, types_too) if "meshinfer." in name}
    return {name if name in known else name.rpartition(".")[0] for name in names} & known
