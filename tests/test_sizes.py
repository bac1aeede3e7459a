"""Modules stay small enough to be read in one sitting."""

from __future__ import annotations

from collections.abc import Mapping

from tests.tree import ROOT, sources

AIM_LINES = 300
MOST_LINES = 600


def longer_than(lines: int, modules: Mapping[str, str]) -> dict[str, int]:
    """The modules with more than `lines` lines."""
    return {path: count for path, text in modules.items() if (count := len(text.splitlines())) > lines}


def grab_bags(paths: Mapping[str, str]) -> list[str]:
    """Modules and packages whose name says nothing."""
    meaningless = {"util", "utils", "helper", "helpers", "misc", "common"}
    return [path for path in paths if meaningless & set(path.removesuffix(".py").split("/"))]


def everything() -> dict[str, str]:
    """The package, its tests and its tools."""
    more = [path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    return sources() | {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in more}


def test_no_module_is_too_long(record_property) -> None:
    record_property("over_the_aim", str(longer_than(AIM_LINES, everything())))
    assert longer_than(MOST_LINES, everything()) == {}


def test_no_module_is_a_grab_bag() -> None:
    assert grab_bags(everything()) == []


def test_the_checkers_find_what_they_are_for() -> None:
    assert longer_than(2, {"a.py": "1\n2\n3\n", "b.py": "1\n2\n"}) == {"a.py": 3}
    assert grab_bags({"shards/utils.py": "", "utils/store.py": "", "shards/store.py": ""}) == [
        "shards/utils.py",
        "utils/store.py",
    ]
