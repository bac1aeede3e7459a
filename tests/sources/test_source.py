"""What a source string names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshinfer.errors import SourceError
from meshinfer.sources.source import (
    AliasSource,
    CheckpointSource,
    GgufSource,
    HubSource,
    IrSource,
    Seen,
    Source,
    decide,
    look,
)

ALIASES = ("smollm2-135m",)
HERE = Path("here").absolute()
NOTHING = Seen(HERE, "nothing")


def folder(*names: str) -> Seen:
    return Seen(HERE, "folder", frozenset(names))


@pytest.mark.parametrize(
    ("source", "seen", "meaning"),
    [
        ("smollm2-135m", NOTHING, AliasSource("smollm2-135m")),
        ("m.gguf", Seen(HERE / "m.gguf", "file"), GgufSource(HERE / "m.gguf")),
        ("M.GGUF", Seen(HERE / "M.GGUF", "file"), GgufSource(HERE / "M.GGUF")),
        ("here", folder("openvino_model.xml", "openvino_model.bin"), IrSource(HERE)),
        ("here", folder("openvino_model.xml", "config.json", "model.safetensors"), IrSource(HERE)),
        ("here", folder("config.json", "model-00001-of-00002.safetensors"), CheckpointSource(HERE)),
        ("here", folder("config.json", "pytorch_model.bin"), CheckpointSource(HERE)),
        ("org/name", NOTHING, HubSource("org/name", "main")),
        (
            "OpenVINO/Qwen2.5-7B-Instruct-int4-ov@v1.0",
            NOTHING,
            HubSource("OpenVINO/Qwen2.5-7B-Instruct-int4-ov", "v1.0"),
        ),
        ("org/name@refs/pr/3", NOTHING, HubSource("org/name", "refs/pr/3")),
        ("org/name", folder("openvino_model.xml"), IrSource(HERE)),
        ("smollm2-135m", folder("openvino_model.xml"), IrSource(HERE)),
    ],
)
def test_every_kind_is_told_from_the_others(source: str, seen: Seen, meaning: Source) -> None:
    assert decide(source, seen, ALIASES) == meaning


@pytest.mark.parametrize(
    ("source", "seen", "message"),
    [
        ("gpt2", NOTHING, r"unknown model source 'gpt2'; a source is a .gguf file, .* or one of: smollm2-135m"),
        ("", NOTHING, "unknown model source ''"),
        ("a/b/c", NOTHING, "unknown model source 'a/b/c'"),
        ("./missing", NOTHING, "no such file or folder"),
        ("/missing/model", NOTHING, "no such file or folder"),
        ("~/missing", NOTHING, "no such file or folder"),
        (r"C:\models\x", NOTHING, "no such file or folder"),
        ("C:/models", NOTHING, "no such file or folder"),
        ("org/name.gguf", NOTHING, "no such file or folder"),
        ("org/name@", NOTHING, "'' after @ is no revision"),
        ("org/name@-x", NOTHING, "'-x' after @ is no revision"),
        ("x.bin", Seen(HERE / "x.bin", "file"), r"x.bin is a file, but not a .gguf file"),
        ("openvino_model.xml", Seen(HERE / "openvino_model.xml", "file"), f"give its folder, {HERE}"),
        ("here", folder(), "has neither openvino_model.xml nor config.json"),
        ("here", folder("config.json"), "has config.json but no weights"),
        ("here", folder("b.gguf", "a.gguf"), r"a folder with .gguf files: name one of them, such as .*a.gguf"),
    ],
)
def test_what_is_no_source_says_why_and_what_would_be_one(source: str, seen: Seen, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        decide(source, seen, ALIASES)
    text = str(caught.value).replace("\\", "/")

    assert re.search(message.replace("\\\\", "/"), text) or message.replace("\\", "/") in text
    assert "\n" not in text


def test_look_lists_the_files_of_a_folder_and_not_its_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    assert look(str(tmp_path)) == Seen(tmp_path, "folder", frozenset({"config.json"}))
    assert look(str(tmp_path / "config.json")).kind == "file"
    assert look(str(tmp_path / "absent")).kind == "nothing"


@pytest.mark.parametrize("source", ["nul\0byte", "x" * 5000])
def test_names_that_no_disk_can_have_are_refused_as_unknown(source: str) -> None:
    with pytest.raises(SourceError):
        decide(source, look(source), ALIASES)


@pytest.mark.parametrize("module", ["sources.source", "sources.convert", "text.tokenizer", "text.template"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, meshinfer.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "transformers", "openvino", "openvino_genai", "huggingface_hub", "optimum", "nncf", "tokenizers"}
    assert heavy.isdisjoint(loaded)
