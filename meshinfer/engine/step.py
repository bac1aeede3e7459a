"""What a stage is asked to do: one step carries the work of many sequences.

A step's tokens or hidden rows lie one after the other in one array, in the order of its entries, so
that a frame from the wire and an inference need no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshinfer.errors import StepError
from meshinfer.types import SequenceId

Tokens = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]


UNLIMITED_BLOCKS = 1 << 40
"""What a stage says it holds where its memory does not grow with the sequence."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`count` positions of one sequence, the first of them `start`.

    A start below what the stage holds rewinds: everything from there on is forgotten. `rows` are the
    positions, relative to `start`, whose logits are wanted. `blocks` is the sequence's block table.
    """

    sequence: SequenceId
    start: int
    count: int
    rows: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Step:
    """One traversal of the ring. `tokens`: [total] i64 for the first stage; `hidden`: [total, width] f32 arrays,
    one per boundary tensor, for the others."""

    entries: tuple[Entry, ...]
    tokens: Tokens | None = None
    hidden: tuple[Rows, ...] = ()

    @property
    def total(self) -> int:
        """Positions in the step."""
        return sum(entry.count for entry in self.entries)

    @property
    def spans(self) -> list[slice]:
        """Where the positions of each entry lie within the step."""
        ends = accumulate(entry.count for entry in self.entries)
        return [slice(end - entry.count, end) for entry, end in zip(self.entries, ends, strict=True)]

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The wanted rows as indices into the step's positions, [rows]."""
        pairs = zip(self.entries, self.spans, strict=True)
        return np.asarray([span.start + row for entry, span in pairs for row in entry.rows], np.int64)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of every row within its sequence, [total]."""
        return np.concatenate([np.arange(entry.start, entry.end, dtype=np.int64) for entry in self.entries])


def join(parts: Sequence[tuple[Rows, ...]]) -> tuple[Rows, ...]:
    """The outputs of several inferences as those of one: every tensor's rows one after the other."""
    return parts[0] if len(parts) == 1 else tuple(np.concatenate(tensors) for tensors in zip(*parts, strict=True))


class Stage(Protocol):
    """A contiguous range of shards, compiled, with the KV cache of its sequences."""

    @property
    def block_tokens(self) -> int:
        """Tokens in one KV block."""

    @property
    def kv_blocks(self) -> int:
        """KV blocks the budget holds."""

    @property
    def block_bytes(self) -> int:
        """Bytes one KV block takes in this stage; 0 where the stage keeps no state."""

    @property
    def rewinds(self) -> bool:
        """Whether a step may start before the end of what the stage holds."""

    def forward(self, step: Step) -> tuple[Rows, ...]:
        """Run one step.

        Returns the boundary's tensors, each [total, width] f32, or for the tail one [rows, vocabulary]
        f32 of logits. The arrays are valid until the next call. Raises StepError, KvBudgetError, DeviceError.
        """

    def release(self, sequence: SequenceId) -> None:
        """Forget a sequence; unknown ones are ignored."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(slots=True)
class Lengths:
    """How many positions of each sequence a stage holds, and the rules for adding to them."""

    rewinds: bool = True
    held: dict[SequenceId, int] = field(default_factory=dict)

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise StepError unless every entry continues its sequence, or rewinds it where that is possible."""
        seen: set[SequenceId] = set()
        for entry in entries:
            held = self.held.get(entry.sequence, 0)
            if entry.count < 1 or entry.start < 0:
                raise StepError(f"sequence {entry.sequence}: {entry.count} positions from {entry.start} is no work")
            if entry.sequence in seen:
                raise StepError(f"sequence {entry.sequence} is in the step twice")
            if entry.start > held:
                raise StepError(f"sequence {entry.sequence} has {held} positions and cannot start at {entry.start}")
            if 0 < entry.start < held and not self.rewinds:
                raise StepError(f"sequence {entry.sequence} cannot go back to {entry.start}: this model's state cannot")
            if any(not 0 <= row < entry.count for row in entry.rows):
                raise StepError(f"sequence {entry.sequence}: rows outside its {entry.count} positions")
            seen.add(entry.sequence)

    def advance(self, entries: Sequence[Entry]) -> None:
        """Note that the entries have run."""
        self.held.update((entry.sequence, entry.end) for entry in entries)

    def forget(self, sequence: SequenceId) -> None:
        """Note that a sequence is gone; unknown ones are ignored."""
        self.held.pop(sequence, None)
