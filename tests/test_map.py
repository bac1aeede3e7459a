"""docs/map.md has one line for every module, and none for a module that does not exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping

from tests.tree import ROOT, sources

LINE = re.compile(r"^- `([\w/]+\.py)`: \S.*$", re.MULTILINE)


def differences(text: str, modules: Mapping[str, str]) -> list[str]:
    """How a map and the modules differ; a package's `__init__.py` without code needs no line."""
    listed = Counter(LINE.findall(text))
    needed = {path for path, source in modules.items() if not path.endswith("/__init__.py") or source.strip()}
    return (
        [f"{path} is not in the map" for path in sorted(needed - set(listed))]
        + [f"{path} is in the map and does not exist" for path in sorted(set(listed) - set(modules))]
        + [f"{path} is in the map {count} times" for path, count in sorted(listed.items()) if count > 1]
    )


def without_docstring(modules: Mapping[str, str]) -> list[str]:
    """Modules with code and no docstring."""
    return [path for path, source in modules.items() if source.strip() and not ast.get_docstring(ast.parse(source))]


def test_the_map_is_complete() -> None:
    assert differences((ROOT / "docs" / "map.md").read_text("utf-8"), sources()) == []


def test_every_module_says_what_it_is() -> None:
    assert without_docstring(sources()) == []


def test_the_checkers_find_what_they_are_for() -> None:
    modules = {"a.py": '"""A."""', "b/c.py": "x = 1", "b/__init__.py": ""}
    assert differences("- `a.py`: one\n- `b/c.py`: two\n", modules) == []
    assert differences("- `a.py`: one\n- `a.py`: again\n- `d.py`: gone\n", modules) == [
        "b/c.py is not in the map",
        "d.py is in the map and does not exist",
        "a.py is in the map 2 times",
    ]
    assert without_docstring(modules) == ["b/c.py"]
