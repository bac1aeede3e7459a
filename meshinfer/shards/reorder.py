"""Give an IR the `Gather(state, beam_idx)` that OpenVINO's KV-cache fusion looks for.

Without it the CPU falls from one fused attention kernel a layer to separate ones, and decoding at a
long context is many times slower (arXiv 2608.19147, first technique). The gather reorders nothing
when beam_idx counts up, so the output does not change.
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from meshinfer.shards.ports import parameter

BEAM_IDX = "beam_idx"
_BATCH_AXIS = 0


def inject_reorder(model: ov.Model) -> int:
    """Let every state be read through `Gather(.., beam_idx)`, in place; returns how many were not yet."""
    bare = [node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue" and not _reordered(node)]
    if not bare:
        return 0
    beam_idx = next((p for p in model.get_parameters() if BEAM_IDX in p.output(0).get_names()), None)
    if beam_idx is None:
        beam_idx = parameter(BEAM_IDX, ov.Type.i32, ov.PartialShape([-1]))
        model.add_parameters([beam_idx])
    for read in bare:
        axis = ops.constant(_BATCH_AXIS, dtype=ov.Type.i32)
        readers = list(read.output(0).get_target_inputs())
        reordered = ops.gather(read, beam_idx, axis)
        reordered.set_friendly_name(f"{read.get_friendly_name()}/reorder")
        axis.set_friendly_name(f"{read.get_friendly_name()}/reorder/axis")
        for reader in readers:
            reader.replace_source_output(reordered.output(0))
    model.validate_nodes_and_infer_types()
    return len(bare)


def _reordered(read: ov.Node) -> bool:
    """Whether a state is used through a gather by an input of the model."""
    users = [target.get_node() for target in read.output(0).get_target_inputs()]
    return any(
        user.get_type_name() == "Gather" and user.input_value(1).get_node().get_type_name() == "Parameter"
        for user in users
    )
