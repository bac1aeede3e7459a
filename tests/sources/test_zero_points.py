"""A converted GGUF file has the weights of the file, not rounded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from meshinfer.config import folders
from meshinfer.sources.convert import prepare
from tests.sources.makers import make_gguf


def matrices_of_ir(graph: Path) -> list[np.ndarray[Any, Any]]:
    """Every matrix of 4 bits in an IR as f32."""
    found = []
    for node in ov.Core().read_model(graph).get_ordered_ops():
        if node.get_type_name() != "Multiply" or node.input_value(0).get_node().get_type_name() != "Subtract":
            continue
        if node.input_value(0).get_node().input_value(0).get_node().input_value(0).get_element_type() == ov.Type.u4:
            model = ov.Model([node.output(0)], [], "weights")
            values = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([])[0]
            found.append(values.reshape(values.shape[0], -1).astype(np.float32))
    return found


def matrices_of_gguf(path: Path, kind: str) -> list[np.ndarray[Any, Any]]:
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return [gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors if t.tensor_type.name == kind]


def distance(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Relative RMS difference of the same rows in any order: each row against the nearest of the other's."""
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1)[None] - 2 * one @ other.T
    nearest = other[squares.argmin(1)]
    return float(np.sqrt(((one - nearest) ** 2).mean() / (other**2).mean()))


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_weights_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "model.gguf", weights=kind)
    wanted = [m for m in matrices_of_gguf(path, kind) if m.shape[0] != 264]
    with prepare(str(path), folders(tmp_path / "home")) as model:
        got = [m for m in matrices_of_ir(model.folder / "openvino_model.xml") if m.shape[0] != 264]
    assert len(got) == len(wanted) == 14
    for matrix in wanted:
        nearest = min(distance(matrix, other) for other in got if other.shape == matrix.shape)
        assert nearest < 2e-3, f"a matrix of {matrix.shape} is off by {nearest:.1%}"
