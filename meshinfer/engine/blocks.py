"""Which KV blocks belong to which sequence. Ids are logical: the same on every stage of a ring."""

from __future__ import annotations

from collections.abc import Mapping

from meshinfer.errors import KvBudgetError
from meshinfer.types import SequenceId


class BlockPool:
    """Blocks 0..count-1, handed out lowest first and taken back when a sequence shrinks or ends."""

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count, self.block_tokens = count, block_tokens
        self._free = list(range(count - 1, -1, -1))
        self._tables: dict[SequenceId, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def table(self, sequence: SequenceId) -> tuple[int, ...]:
        """The blocks of a sequence in order of position."""
        return tuple(self._tables.get(sequence, ()))

    def resize(self, sequence: SequenceId, tokens: int) -> tuple[int, ...]:
        """Give a sequence the blocks for `tokens` positions and return its table.

        Raises KvBudgetError, with nothing changed, where too few are free.
        """
        table = self._tables.get(sequence, [])
        missing = self.needed(tokens) - len(table)
        if missing > len(self._free):
            raise self._too_few(missing)
        for _ in range(missing):
            table.append(self._free.pop())
        while missing < 0:
            self._free.append(table.pop())
            missing += 1
        self._tables[sequence] = table
        return tuple(table)

    def resize_all(self, lengths: Mapping[SequenceId, int]) -> dict[SequenceId, tuple[int, ...]]:
        """`resize` several sequences, or none of them: what some give back the others may have."""
        missing = {sequence: self.needed(tokens) - len(self.table(sequence)) for sequence, tokens in lengths.items()}
        if sum(missing.values()) > len(self._free):
            raise self._too_few(sum(missing.values()))
        return {
            sequence: self.resize(sequence, lengths[sequence]) for sequence in sorted(missing, key=missing.__getitem__)
        }

    def release(self, sequence: SequenceId) -> None:
        """Take back all blocks of a sequence; unknown ones are ignored."""
        self._free.extend(reversed(self._tables.pop(sequence, [])))

    def _too_few(self, missing: int) -> KvBudgetError:
        return KvBudgetError(
            f"{missing} more KV blocks of {self.block_tokens} tokens needed, {len(self._free)} of {self.count} free"
        )
