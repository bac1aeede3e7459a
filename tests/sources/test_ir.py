"""Looking at IR folders without loading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshinfer.errors import SourceError
from meshinfer.sources.ir import check_ir, read_graph
from tests.sources.makers import make_ir


def test_a_whole_ir_passes_and_says_what_it_is(tmp_path: Path) -> None:
    graph = check_ir(make_ir(tmp_path))
    assert graph.inputs == {"input_ids", "attention_mask"}
    assert "logits" in graph.outputs
    assert graph.precision == "f16"
    assert graph.weights_end == (tmp_path / "openvino_model.bin").stat().st_size


def test_missing_and_truncated_weights_are_told_with_the_numbers(tmp_path: Path) -> None:
    weights = make_ir(tmp_path) / "openvino_model.bin"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SourceError, match=f"truncated: {size} bytes expected, {size - 1} there"):
        check_ir(tmp_path)
    weights.unlink()
    with pytest.raises(SourceError, match=f"no openvino_model.bin: {size} bytes expected"):
        check_ir(tmp_path)


def test_other_models_are_refused_with_what_they_lack(tmp_path: Path) -> None:
    folder = make_ir(tmp_path, output="last_hidden_state", inputs=("input_ids", "token_type_ids"))
    message = "is not a language model that generates text: it has no attention_mask and no logits"
    with pytest.raises(
        SourceError, match=message + r" \(inputs: input_ids, token_type_ids; outputs: last_hidden_state"
    ):
        check_ir(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged or not an OpenVINO IR"),
        ("<net><layers>", "damaged or not an OpenVINO IR"),
        ("<html></html>", "is not an OpenVINO IR"),
        ('<net><layers><layer type="Const"><data offset="x" size="1"/></layer></layers></net>', "damaged"),
        ('<!DOCTYPE net [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><net>&b;</net>', "declares a document type"),
    ],
)
def test_damaged_graphs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "openvino_model.xml"
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        read_graph(path)
