"""Give the weights of a converted GGUF file back what openvino-genai's reader rounds away.

Q4_1 and Q4_K keep a weight as `scale * q + minimum`. OpenVINO keeps it as `scale * (q - zero_point)`, and the reader
rounds `zero_point = -minimum / scale` to one of 0..15: on a real model that moves weights by 8 to 9 % and answers
with them. Kept in f16 the zero points are exact to 11 bits, and the same fused kernels take them. A group whose scale
is 0 stays what the reader makes of it: all zero.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from meshinfer.errors import SourceError
from meshinfer.sources.gguf import GgufHeader, TensorInfo, read_file

Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_Q4_1_BLOCK, _Q4_K_BLOCK = 20, 144
_KINDS = {"Q4_1", "Q4_K"}
_EMBEDDING = "token_embd.weight"
"""The reader may keep it in another precision, with zero points of its own."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of one matrix, each [rows, groups]: the scale as the reader keeps it, and the exact zero point."""

    scales: Halves
    zero_points: Halves

    @property
    def key(self) -> str:
        """The same for the same rows in any order: the reader permutes the rows of some matrices."""
        return _key(self.scales)


def restore_zero_points(gguf: Path, graph: Path, output: Path) -> int:
    """Write the IR at `graph` to `output` (.xml, and .bin beside it) with exact zero points; how many were mended.

    Nothing is written where there are none to mend. Raises SourceError where a matrix cannot be found in the IR.
    """
    header = read_file(gguf)
    tensors = {_groups(gguf, header, tensor).key: tensor for tensor in _affine(header)}
    model = ov.Core().read_model(graph)
    mended: set[str] = set()
    for subtract, scales in _rounded(model):
        tensor = tensors.get(key := _key(scales))
        if tensor is None:
            continue  # of a kind whose zero points the reader keeps as they are
        exact = _in_order(_groups(gguf, header, tensor), scales)
        constant = ops.constant(exact[:, :, None])
        constant.set_friendly_name(f"{subtract.get_friendly_name()}/zero_point")
        subtract.input(1).replace_source_output(constant.output(0))
        mended.add(key)
    lost = [tensor.name for key, tensor in tensors.items() if key not in mended and tensor.name != _EMBEDDING]
    if lost:
        raise SourceError(f"{gguf.name}: the weights of '{lost[0]}' are not where openvino-genai used to put them")
    if mended:
        ov.serialize(model, output, output.with_suffix(".bin"))
    return len(mended)


def _affine(header: GgufHeader) -> list[TensorInfo]:
    return [tensor for tensor in header.tensors if tensor.type_name in _KINDS and len(tensor.shape) == 2]


def _groups(gguf: Path, header: GgufHeader, tensor: TensorInfo) -> _Groups:
    raw = np.fromfile(gguf, np.uint8, tensor.size_bytes, offset=header.data_start + tensor.offset)
    scales, minimums = _q4_1(raw) if tensor.type_name == "Q4_1" else _q4_k(raw)
    rows = tensor.shape[1]
    kept = scales.astype(np.float16)
    divisor = np.where(kept == 0, np.float32(1), kept.astype(np.float32))
    zero_points = np.clip(-minimums / divisor, -65504, 65504).astype(np.float16)
    return _Groups(kept.reshape(rows, -1), zero_points.reshape(rows, -1))


def _q4_1(raw: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of every group of 32: a block is two halves and 16 bytes of nibbles."""
    head = raw.reshape(-1, _Q4_1_BLOCK)[:, :4].copy().view(np.float16).astype(np.float32)
    return head[:, 0], head[:, 1]


def _q4_k(raw: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of every group of 32: a block of 8 groups is two halves, 12 bytes that pack a 6-bit factor
    for either half and every group, and 128 bytes of nibbles."""
    blocks = raw.reshape(-1, _Q4_K_BLOCK)
    head = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    low, middle, high = (blocks[:, 4 + 4 * part : 8 + 4 * part] for part in range(3))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return (head[:, :1] * scales).reshape(-1), (-head[:, 1:] * minimums).reshape(-1)


def _rounded(model: ov.Model) -> Iterator[tuple[ov.Node, Halves]]:
    """Every `weights - zero point` of 4 bits, with the scales [rows, groups] that multiply it."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Subtract":
            continue
        zero_point = node.input_value(1).get_node()
        if zero_point.get_type_name() != "Convert" or zero_point.input_value(0).get_element_type() != ov.Type.u4:
            continue
        multiply = next(iter(node.output(0).get_target_inputs())).get_node()
        scales = multiply.input_value(1).get_node().get_data()
        yield node, scales.reshape(scales.shape[0], -1)


def _key(scales: Halves) -> str:
    rows = np.ascontiguousarray(scales).view(np.dtype((np.void, scales.shape[1] * 2))).reshape(-1)
    return f"{scales.shape} {hashlib.sha256(np.sort(rows).tobytes()).hexdigest()}"


def _in_order(groups: _Groups, scales: Halves) -> Halves:
    """The zero points of rows that have these scales. Rows with equal scales keep their order."""
    place: dict[bytes, list[int]] = {}
    for row in range(len(groups.scales) - 1, -1, -1):
        place.setdefault(groups.scales[row].tobytes(), []).append(row)
    return groups.zero_points[[place[row.tobytes()].pop() for row in scales]]
