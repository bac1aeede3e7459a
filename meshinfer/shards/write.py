"""Write the shards of a model into the store, one at a time."""

from __future__ import annotations

from pathlib import Path

import openvino as ov

from meshinfer.errors import CutError, SourceError, telling_line
from meshinfer.files.disk import converted
from meshinfer.files.progress import Progress
from meshinfer.shards.cut import Cutter
from meshinfer.shards.manifest import ShardKind, ShardSpec, TensorSpec
from meshinfer.shards.ports import output_name
from meshinfer.shards.reorder import inject_reorder
from meshinfer.shards.store import Store

_F32_BYTES = 4
_LOGITS_RANK = 3


def write_shards(store: Store, graph: Path, work: Path, progress: Progress) -> tuple[ShardSpec, ...]:
    """Cut the IR at `graph` and put every shard into the store; call inside `store.adding`.

    Raises CutError where the graph is not one that can be cut, NoSpaceError, SourceError.
    """
    try:
        model = ov.Core().read_model(graph)
    except RuntimeError as error:
        raise SourceError(f"OpenVINO cannot read {graph}: {telling_line(error)}") from error
    inject_reorder(model)
    cutter = Cutter(model)
    specs = []
    for index in range(cutter.shards):
        progress("cut", index, cutter.shards)
        specs.append(_write(store, cutter, index, work))
    progress("cut", cutter.shards, cutter.shards)
    return tuple(specs)


def _write(store: Store, cutter: Cutter, index: int, work: Path) -> ShardSpec:
    xml, weights = work / f"shard{index:03d}.xml", work / f"shard{index:03d}.bin"
    with cutter.shard(index) as model:
        with converted(work):
            try:
                ov.serialize(model, xml, weights)
            except RuntimeError as error:
                raise SourceError(f"cannot write shard {index} to {work}: {telling_line(error)}") from error
        inputs = [_tensor(p.output(0), p.output(0).get_any_name()) for p in model.get_parameters()]
        outputs = [_tensor(r.output(0), r.output(0).get_any_name()) for r in model.get_results()]
        per_token, fixed = _state_bytes(model)
    if index == cutter.shards - 1 and (len(outputs[0].shape) != _LOGITS_RANK or outputs[0].shape[-1] < 1):
        raise CutError(f"this model's logits are {list(outputs[0].shape)}, not [batch, sequence, vocabulary]")
    return ShardSpec(
        index=index,
        kind=_kind(index, cutter.shards),
        graph=store.add_file(xml, xml.name),
        weights=store.add_file(weights, weights.name),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        kv_bytes_per_token=per_token,
        fixed_state_bytes=fixed,
    )


def _kind(index: int, shards: int) -> ShardKind:
    if index == 0:
        return "embedding"
    return "head" if index == shards - 1 else "layer"


def _tensor(port: ov.Output, name: str) -> TensorSpec:
    dims = port.get_partial_shape()
    shape = tuple(dim.get_length() if dim.is_static else -1 for dim in dims)
    return TensorSpec(name.removesuffix(output_name("")), port.get_element_type().to_string(), shape)


def _state_bytes(model: ov.Model) -> tuple[int, int]:
    """f32 bytes of state per token, and per sequence where the state does not grow; the first axis is the batch."""
    per_token = fixed = 0
    for sink in model.get_sinks():
        dims = list(sink.input_value(0).get_partial_shape())[1:]
        size = _F32_BYTES
        for dim in dims:
            size *= dim.get_length() if dim.is_static else 1
        if any(dim.is_dynamic for dim in dims):
            per_token += size
        else:
            fixed += size
    return per_token, fixed
