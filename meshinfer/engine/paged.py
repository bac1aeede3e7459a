"""The paged back end: attention reads its past from fixed blocks, so that one inference serves many sequences.

OpenVINO's own pass turns the composed stage's attention into PagedAttention. Rewinding is nothing
but a smaller past length.
"""

from __future__ import annotations

import math

import numpy as np
import openvino as ov

from meshinfer.engine.devices import Device, converting, core
from meshinfer.engine.inference import Array, Inference
from meshinfer.engine.step import Lengths, Rows, Step
from meshinfer.errors import KvBudgetError, PagedUnsupportedError, StepError, telling_line
from meshinfer.shards.ports import HIDDEN, ROWS
from meshinfer.types import SequenceId

_EMBEDS = "inputs_embeds"
"""What the pass insists on calling hidden states that come in."""

_BLOCKS = ("subsequence_begins", "block_indices", "block_indices_begins", "past_lens", "max_context_len")
_INPUTS = frozenset({"input_ids", _EMBEDS, "position_ids", ROWS, *_BLOCKS})
"""What a paged stage is fed, besides its caches; the pass adds other inputs for state that is not attention KV."""


def to_paged(model: ov.Model) -> ov.Model:
    """Turn a composed stage's SDPA into PagedAttention, in place. Raises PagedUnsupportedError.

    Inputs afterwards: [tokens] i64 ids or [tokens, width] f32 hidden states, positions, block tables
    and one cache pair per layer. Output: [tokens, 1, width] or [rows, 1, vocabulary].
    """
    from openvino._offline_transformations import paged_attention_transformation

    hidden = [p for p in model.get_parameters() if any(name.startswith(HIDDEN) for name in p.output(0).get_names())]
    if len(hidden) > 1:
        raise PagedUnsupportedError("paged attention takes one boundary tensor, this stage has several")
    for parameter in hidden:
        width = parameter.get_partial_shape()[2]
        parameter.output(0).set_names({_EMBEDS})
        parameter.set_friendly_name(_EMBEDS)
    try:
        paged_attention_transformation(model)
        for parameter in hidden:
            parameter.set_partial_shape(ov.PartialShape([ov.Dimension(-1), width]))
        model.validate_nodes_and_infer_types()
    except RuntimeError as error:
        raise PagedUnsupportedError(f"no paged attention for this model: {telling_line(error)}") from error
    if model.get_sinks() or any(not _is_fed(parameter.output(0)) for parameter in model.get_parameters()):
        raise PagedUnsupportedError("this model has state that is not attention KV, paged attention cannot keep it")
    return model


class PagedStage:
    """A stage with a paged KV cache of a fixed number of blocks."""

    rewinds = True

    def __init__(self, compiled: ov.CompiledModel, device: Device, budget_bytes: int) -> None:
        """Reserve as many KV blocks as `budget_bytes` hold. Raises DeviceError."""
        caches = [port for port in compiled.inputs if _is_cache(port)]
        self.block_tokens = device.kv_block_tokens
        self.block_bytes = sum(_block_bytes(port) for port in caches)
        self.kv_blocks = budget_bytes // self.block_bytes
        self._inference = Inference(compiled, device.name)
        with converting(device.name, f"reserving {self.kv_blocks * self.block_bytes / 1e6:.0f} MB of KV cache"):
            for port in caches:
                self._inference.request.set_tensor(port, _allocate(port, self.kv_blocks, device))
        self._lengths = Lengths()

    def forward(self, step: Step) -> tuple[Rows, ...]:
        """See `Stage.forward`."""
        self._lengths.check(step.entries)
        entries = step.entries
        blocks = [_covering(entry.blocks, entry.end, self.block_tokens) for entry in entries]
        if any(not 0 <= block < self.kv_blocks for table in blocks for block in table):  # would write anywhere
            raise StepError(f"a KV block that is none of the {self.kv_blocks} of this stage")
        values: dict[str, Array] = {
            "position_ids": step.positions,
            "past_lens": np.array([entry.start for entry in entries], np.int32),
            "subsequence_begins": _begins([entry.count for entry in entries]),
            "block_indices": np.array([block for table in blocks for block in table], np.int32),
            "block_indices_begins": _begins([len(table) for table in blocks]),
            "max_context_len": np.array(max(entry.end for entry in entries), np.int32),
            ROWS: step.rows,
        }
        if step.tokens is not None:
            values["input_ids"] = step.tokens
        if step.hidden:
            values[_EMBEDS] = step.hidden[0]
        outputs = self._inference.run(values)
        self._lengths.advance(entries)
        return tuple(output.reshape(output.shape[0], output.shape[-1]) for output in outputs)

    def release(self, sequence: SequenceId) -> None:
        """See `Stage.release`; the blocks themselves belong to whoever handed them out."""
        self._lengths.forget(sequence)

    def close(self) -> None:
        """Give the cache and the compiled model back."""
        del self._inference


def _is_cache(port: ov.Output) -> bool:
    return any(name.startswith(("key_cache.", "value_cache.")) for name in port.get_names())


def _is_fed(port: ov.Output) -> bool:
    return _is_cache(port) or not _INPUTS.isdisjoint(port.get_names())


def _block_shape(port: ov.Output) -> list[int]:
    return [dim.get_length() for dim in list(port.get_partial_shape())[1:]]


def _block_bytes(port: ov.Output) -> int:
    return int(math.prod(_block_shape(port)) * port.get_element_type().size)


def _allocate(port: ov.Output, blocks: int, device: Device) -> ov.Tensor:
    shape = [blocks, *_block_shape(port)]
    if device.kind == "CPU":
        return ov.Tensor(port.get_element_type(), ov.Shape(shape))
    return core().get_default_context(device.name).create_tensor(port.get_element_type(), ov.Shape(shape), {})


def _begins(counts: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """[0, a, a + b, ...] for [a, b, ...]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _covering(table: tuple[int, ...], tokens: int, block_tokens: int) -> tuple[int, ...]:
    """The part of a block table that `tokens` positions reach into."""
    count = -(-tokens // block_tokens)
    if len(table) < count:
        raise KvBudgetError(f"{tokens} positions need {count} KV blocks, the sequence has {len(table)}")
    return table[:count]
