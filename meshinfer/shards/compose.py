"""Join consecutive shards into one model that compiles to the kernels of the unsplit one.

Every shard brings its own copy of what depends only on inputs (rotary tables, masks). Copies carry
the name of the op they were copied from, so one of each is kept and the others' readers are moved
to it; without that a stage of 15 layers is a fifth slower than the same layers unsplit.
"""

from __future__ import annotations

from collections.abc import Sequence

import openvino as ov

from meshinfer.errors import CutError
from meshinfer.shards.ports import HIDDEN, copy_runtime_options, output_name, snapshot


def compose(shards: Sequence[ov.Model], name: str = "stage", *, every_boundary: bool = False) -> ov.Model:
    """One model of consecutive `shards`, which are taken apart for it.

    Inputs: those of the first shard, plus attention_mask, position_ids, beam_idx where a shard has
    them. Outputs: those of the last, or with `every_boundary` those of all, in order. Raises CutError where an output
    meets no input.
    """
    known: dict[str, ov.Node] = {}
    parameters: dict[str, ov.Node] = {}
    sinks: list[ov.Node] = []
    kept: list[ov.Node] = []
    outgoing: dict[str, ov.Output] = {}
    for number, shard in enumerate(shards):
        graph, nodes = snapshot(shard)
        seeds = [p for p, op in enumerate(graph.ops) if _carries_values(op.type, op.name)]
        own = graph.dependents(seeds)
        for position, node in enumerate(nodes):
            op = graph.ops[position]
            if op.type == "Parameter":
                if number and op.name.startswith(HIDDEN):
                    if op.name not in outgoing:
                        raise CutError(f"{shard.get_friendly_name()} wants {op.name}, the shard before it gives none")
                    _move(node.output(0), outgoing[op.name])
                elif op.name in parameters:
                    _move(node.output(0), parameters[op.name].output(0))
                else:
                    parameters[op.name] = node
            elif position not in own and op.type not in ("Result", "Assign"):
                twin = known.setdefault(op.name, node)
                if twin is not node and twin.get_type_name() == op.type:
                    for port, output in enumerate(node.outputs()):
                        _move(output, twin.output(port))
        sinks.extend(node for node in nodes if node.get_type_name() == "Assign")
        results = shard.get_results()
        outgoing = {_boundary(result): result.input_value(0) for result in results}
        kept = [*kept, *results] if every_boundary else results
    if every_boundary:  # the boundaries' tensors are called alike, and one model cannot name two so
        for number, result in enumerate(kept):
            result.output(0).set_names({f"boundary.{number}"})
    try:
        stage = ov.Model(kept, sinks, list(parameters.values()), name)
    except RuntimeError as error:
        raise CutError(f"these shards do not fit together: {error}") from error
    copy_runtime_options(shards[0], stage)
    return stage


def _carries_values(kind: str, name: str) -> bool:
    return kind == "ReadValue" or (kind == "Parameter" and (name.startswith(HIDDEN) or name == "input_ids"))


def _boundary(result: ov.Node) -> str:
    name: str = next(iter(result.output(0).get_names()), result.get_friendly_name())
    return name.removesuffix(output_name(""))


def _move(output: ov.Output, source: ov.Output) -> None:
    for target in output.get_target_inputs():
        target.replace_source_output(source)
