"""Whether a folder holds a whole OpenVINO IR of a language model, read from its XML without loading it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from meshinfer.errors import SourceError
from meshinfer.sources.source import IR_GRAPH, IR_WEIGHTS

_BITS = {"i4": 4, "u4": 4, "nf4": 4, "f4e2m1": 4, "i8": 8, "u8": 8, "f8e4m3": 8, "f8e5m2": 8}
_BITS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_LABELS = {"i4": "int4", "u4": "int4", "i8": "int8", "u8": "int8"}


@dataclass(slots=True)
class IrGraph:
    """What the XML says of a model."""

    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    weight_values: Counter[str] = field(default_factory=Counter)
    """Number of weights by element type."""
    weights_end: int = 0
    """Bytes that the weights file must have."""
    runtime_info: dict[str, str] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """The type that most weights have, such as "int4" or "f16"."""
        kind = self.weight_values.most_common(1)[0][0] if self.weight_values else "none"
        return _LABELS.get(kind, kind)


def check_ir(folder: Path) -> IrGraph:
    """Read the IR in `folder`. Raises SourceError where it is not whole or is no language model."""
    graph = read_graph(folder / IR_GRAPH)
    weights = folder / IR_WEIGHTS
    if not weights.is_file():
        raise SourceError(f"{folder} has {IR_GRAPH} but no {IR_WEIGHTS}: {graph.weights_end} bytes expected")
    actual = weights.stat().st_size
    if actual < graph.weights_end:
        raise SourceError(f"{weights} is truncated: {graph.weights_end} bytes expected, {actual} there")
    missing = [name for name in ("input_ids", "attention_mask") if name not in graph.inputs]
    missing += [] if "logits" in graph.outputs else ["logits"]
    if missing:
        raise SourceError(
            f"{folder} is not a language model that generates text: it has no {' and no '.join(missing)} "
            f"(inputs: {_names(graph.inputs)}; outputs: {_names(graph.outputs)})"
        )
    return graph


def read_graph(path: Path) -> IrGraph:
    """Stream the XML of an IR. Raises SourceError where it cannot be read."""
    parser, reader = expat.ParserCreate(), _Reader()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = reader.doctype
    try:
        with path.open("rb") as file:
            parser.ParseFile(file)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise SourceError(f"{path} is damaged or not an OpenVINO IR: {error}") from error
    if not reader.is_ir:
        raise SourceError(f"{path} is not an OpenVINO IR")
    return reader.graph


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "none"


class _Reader:
    """expat handlers. An IR has no document type, and without one no entity can grow."""

    def __init__(self) -> None:
        self.graph = IrGraph()
        self.is_ir = False
        self._layer = ""
        self._path: list[str] = []

    def doctype(self, *_: Any) -> None:
        raise ValueError("it declares a document type")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._path.append(tag)
        if tag == "layer":
            self._layer = attributes.get("type", "")
            if self._layer == "Result":
                self.graph.outputs |= _split(attributes.get("output_names", ""))
        elif tag == "port":
            self._port(attributes)
        elif tag == "data" and self._layer == "Const":
            self._constant(attributes)
        elif tag == "net":
            self.is_ir = len(self._path) == 1
        elif len(self._path) == 3 and self._path[1] == "rt_info" and "value" in attributes:
            self.graph.runtime_info[tag] = attributes["value"]

    def end(self, tag: str) -> None:
        self._path.pop()

    def _port(self, attributes: dict[str, str]) -> None:
        names = _split(attributes.get("names", ""))
        if self._layer == "Parameter":
            self.graph.inputs |= names
        elif "logits" in names:
            self.graph.outputs.add("logits")

    def _constant(self, attributes: dict[str, str]) -> None:
        size = int(attributes.get("size", "0"))
        self.graph.weights_end = max(self.graph.weights_end, int(attributes.get("offset", "0")) + size)
        kind = attributes.get("element_type", "")
        if kind in _BITS:
            self.graph.weight_values[kind] += size * 8 // _BITS[kind]


def _split(names: str) -> set[str]:
    return {name.strip() for name in names.split(",") if name.strip()}
