"""Stages without attention: an embedding or a head alone."""

from __future__ import annotations

import numpy as np
import openvino as ov

from meshinfer.engine.inference import Array, Inference
from meshinfer.engine.step import UNLIMITED_BLOCKS, Lengths, Rows, Step, join
from meshinfer.shards.ports import ROWS, boundary_name
from meshinfer.types import SequenceId


class StatelessStage:
    """A stage that keeps nothing between steps, so that any number of KV blocks fit."""

    rewinds = True
    block_bytes = 0
    kv_blocks = UNLIMITED_BLOCKS

    def __init__(self, compiled: ov.CompiledModel, device: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._inference = Inference(compiled, device)
        self._lengths = Lengths()

    def forward(self, step: Step) -> tuple[Rows, ...]:
        """See `Stage.forward`. All entries run as one sequence, unless positions are counted from the mask."""
        self._lengths.check(step.entries)
        if "attention_mask" not in self._inference.inputs:
            parts = [self._run(step, slice(0, step.total), step.rows, None)]
        else:
            parts = []
            for entry, span in zip(step.entries, step.spans, strict=True):
                outputs = self._run(step, span, np.asarray(entry.rows, np.int64), entry.end)
                parts.append(tuple(output.copy() for output in outputs))
        self._lengths.advance(step.entries)
        return join(parts)

    def release(self, sequence: SequenceId) -> None:
        """See `Stage.release`."""
        self._lengths.forget(sequence)

    def close(self) -> None:
        """Give the compiled model back."""
        del self._inference

    def _run(self, step: Step, span: slice, rows: Array, past_and_present: int | None) -> tuple[Rows, ...]:
        values: dict[str, Array] = {"position_ids": step.positions[span][None], ROWS: rows}
        if past_and_present is not None:
            values["attention_mask"] = np.ones((1, past_and_present), np.int64)
        if step.tokens is not None:
            values["input_ids"] = step.tokens[span][None]
        for index, hidden in enumerate(step.hidden):
            values[boundary_name(index)] = hidden[span][None]
        return tuple(output[0] for output in self._inference.run(values))
