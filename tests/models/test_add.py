"""What a model is called where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshinfer.models.add import default_name
from meshinfer.sources.source import AliasSource, GgufSource, HubSource, IrSource, Source


@pytest.mark.parametrize(
    ("source", "found", "name"),
    [
        ("smollm2-135m", AliasSource("smollm2-135m"), "smollm2-135m"),
        ("/home/jo@firm/models/Llama 3.gguf", GgufSource(Path()), "llama-3"),
        ("C:\\models\\Qwen3-8B-int4-ov\\", IrSource(Path()), "qwen3-8b-int4-ov"),
        ("org/Name@v1.2/x", HubSource("org/Name", "v1.2/x"), "name"),
        ("/models/\u6a21\u578b", IrSource(Path()), "model"),
    ],
)
def test_the_last_part_of_the_source_is_the_name(source: str, found: Source, name: str) -> None:
    assert default_name(source, found) == name
