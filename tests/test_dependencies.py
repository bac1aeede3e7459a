"""What meshinfer imports is what pyproject.toml says it needs."""

from __future__ import annotations

import re
import sys
import tomllib

from tests.tree import ROOT, imported, sources

CHILD = "sources/child.py"
"""The conversion of checkpoints, in a process of its own: it alone may import what the `export` extra brings."""

INDIRECT = {"openvino-tokenizers", "nncf", "typer-slim", "safetensors", "torch", "transformers"}
"""Loaded by other packages: the OpenVINO tokenizers by openvino-genai, the rest by optimum-intel."""

PACKAGES = {"optimum": "optimum-intel", "openvino_genai": "openvino-genai"}
"""Packages with another name than what they are imported as."""


def third_party(paths: set[str]) -> set[str]:
    """Packages that these modules import, by the name they are installed by."""
    texts = sources()
    names = {name.split(".")[0] for path in paths for name in imported(texts[path], path)}
    return {PACKAGES.get(name, name) for name in names - sys.stdlib_module_names - {"meshinfer"}}


def project() -> dict[str, list[str]]:
    """The required packages by extra; "" is what everybody gets."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {"": data["dependencies"], **data["optional-dependencies"]}
    return {extra: [re.split(r"[<>=!~ \[]", line)[0] for line in lines] for extra, lines in groups.items()}


def test_dependencies_are_what_is_imported() -> None:
    needed = third_party(set(sources()) - {CHILD})
    assert needed | {"openvino-tokenizers"} == set(project()[""])


def test_the_export_extra_is_what_the_conversion_needs() -> None:
    groups = project()
    assert third_party({CHILD}) - set(groups[""]) <= set(groups["export"])
    assert set(groups["export"]) - INDIRECT == third_party({CHILD}) - set(groups[""])


def test_developers_get_the_export_extra_with_the_same_bounds() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(extras["export"]) <= set(extras["dev"])
