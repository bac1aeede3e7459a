"""The stateful back end: OpenVINO keeps each sequence's KV cache inside an infer request of its own.

Rejected positions are cut out of the state. Where `mask_rewinds` is asked for they are masked out through
`attention_mask` instead, and cut when many have gathered (arXiv 2608.19147, section on mask-based rewind). That is
for models whose attention looks at positions and mask only: a sliding window that counts slots of the cache counts
masked ones too. It is never exact, because a masked position still changes the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import openvino as ov

from meshinfer.engine.devices import converting
from meshinfer.engine.inference import Array, Inference
from meshinfer.engine.step import UNLIMITED_BLOCKS, Entry, Lengths, Rows, Step, join
from meshinfer.errors import StepError
from meshinfer.shards.ports import ROWS, boundary_name
from meshinfer.types import SequenceId

BLOCK_TOKENS = 32
"""A request's state grows freely; budgets are still counted in blocks, as in the paged back end."""

_SLOT_AXIS = 2
"""KV state is [batch, heads, slots, head size]."""

MAX_JUNK = 128
"""Masked-out positions a sequence may gather before its state is cut."""


@dataclass(slots=True)
class _Cache:
    """One sequence's request. `valid[slot]` says whether a slot of its state counts."""

    inference: Inference
    valid: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


class StatefulStage:
    """A stage that keeps one infer request per sequence."""

    block_tokens = BLOCK_TOKENS

    def __init__(
        self,
        compiled: ov.CompiledModel,
        device: str,
        budget_bytes: int,
        kv_bytes_per_token: int,
        rewinds: bool,
        mask_rewinds: bool,
    ) -> None:
        self._compiled, self._device = compiled, device
        self.block_bytes = kv_bytes_per_token * self.block_tokens
        self.kv_blocks = budget_bytes // self.block_bytes if self.block_bytes else UNLIMITED_BLOCKS
        self.rewinds = rewinds
        self._lengths = Lengths(rewinds)
        self._caches: dict[SequenceId, _Cache] = {}
        self._spare: list[Inference] = []
        self._masks = mask_rewinds and any("attention_mask" in port.get_names() for port in compiled.inputs)

    def forward(self, step: Step) -> tuple[Rows, ...]:
        """See `Stage.forward`: one inference per entry, for want of a batch dimension with different lengths."""
        self._lengths.check(step.entries)
        several = len(step.entries) > 1
        parts = [
            self._run(entry, step, span, copy=several) for entry, span in zip(step.entries, step.spans, strict=True)
        ]
        self._lengths.advance(step.entries)
        return join(parts)

    def release(self, sequence: SequenceId) -> None:
        """See `Stage.release`; the request is kept for the next sequence."""
        self._lengths.forget(sequence)
        if cache := self._caches.pop(sequence, None):
            self._spare.append(cache.inference)

    def close(self) -> None:
        """Give all requests back."""
        self._caches.clear()
        self._spare.clear()
        del self._compiled

    def _run(self, entry: Entry, step: Step, rows: slice, copy: bool) -> tuple[Rows, ...]:
        cache = self._caches.get(entry.sequence) or self._open(entry.sequence)
        self._rewind(cache, entry.start)
        valid = np.concatenate([cache.valid, np.ones(entry.count, np.bool_)])
        values: dict[str, Array] = {
            "attention_mask": valid.astype(np.int64)[None],
            "position_ids": np.arange(entry.start, entry.end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
            ROWS: np.asarray(entry.rows, np.int64),
        }
        if step.tokens is not None:
            values["input_ids"] = step.tokens[rows][None]
        for index, hidden in enumerate(step.hidden):
            values[boundary_name(index)] = hidden[rows][None]
        outputs = cache.inference.run(values)
        cache.valid = valid
        return tuple(output[0].copy() if copy else output[0] for output in outputs)

    def _open(self, sequence: SequenceId) -> _Cache:
        inference = self._spare.pop() if self._spare else Inference(self._compiled, self._device)
        with converting(self._device, "resetting state"):
            inference.request.reset_state()
        cache = self._caches[sequence] = _Cache(inference)
        return cache

    def _rewind(self, cache: _Cache, start: int) -> None:
        slots = np.flatnonzero(cache.valid)
        if len(slots) == start:
            return
        if start == 0:
            with converting(self._device, "resetting state"):
                cache.inference.request.reset_state()
            cache.valid = np.zeros(0, np.bool_)
            return
        cache.valid[slots[start:]] = False
        junk = len(cache.valid) - start
        if junk > MAX_JUNK or not self._masks:
            self._cut(cache)

    def _cut(self, cache: _Cache) -> None:
        """Keep only the valid slots of the state."""
        keep = np.flatnonzero(cache.valid)
        with converting(self._device, "cutting state"):
            for state in cache.inference.request.query_state():
                values = state.state.data
                if values.shape[_SLOT_AXIS] != len(cache.valid):
                    raise StepError(f"state {state.name} has shape {values.shape}: its positions cannot be told")
                state.state = ov.Tensor(np.ascontiguousarray(values.take(keep, axis=_SLOT_AXIS)))
        cache.valid = np.ones(len(keep), np.bool_)
