"""The unsplit IR in a plain loop: what composed stages are compared with, in output and in speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshinfer.engine.devices import Device, compile_properties, converting, core
from meshinfer.engine.inference import Array, Inference
from meshinfer.engine.step import Rows, Tokens
from meshinfer.types import Precision


class UnsplitModel:
    """Sequences of equal length through an ordinary stateful IR."""

    def __init__(self, graph: Path, device: Device, precision: Precision, threads: int | None) -> None:
        """Compile the IR at `graph`. Raises DeviceError."""
        properties = compile_properties(device.name, precision, threads)
        with converting(device.name, f"compiling {graph.name}"):
            compiled = core().compile_model(core().read_model(graph), device.name, properties)
        self._inference = Inference(compiled, device.name)
        self.vocabulary = compiled.output(0).get_partial_shape()[2].get_length()

    def reset(self) -> None:
        """Forget the sequence."""
        self._inference.request.reset_state()

    def forward(self, tokens: Tokens, start: int) -> Rows:
        """Logits [count, vocabulary] f32 of tokens [count] i64 at positions from `start`; valid until the next call."""
        logits: Rows = self.forward_batch(tokens[None], start)[0]
        return logits

    def forward_batch(self, tokens: Tokens, start: int) -> Rows:
        """Logits [batch, count, vocabulary] f32 of tokens [batch, count] i64 at positions from `start`."""
        batch, count = tokens.shape
        positions = np.arange(start, start + count, dtype=np.int64)
        values: dict[str, Array] = {
            "input_ids": tokens,
            "attention_mask": np.ones((batch, start + count), np.int64),
            "position_ids": np.broadcast_to(positions, (batch, count)),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        (logits,) = self._inference.run(values)
        return logits
