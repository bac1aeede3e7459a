"""Which KV blocks belong to which sequence. Ids are logical: the same on every stage of a ring."""

from __future__ import annotations

from collections.abc import Mapping

from meshinfer.errors import KvBudgetError
from meshinfer.types import SequenceId


class BlockPool:
    """Blocks 0..count-1; the ones that sequences gave back are handed out before new ones."""

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count, self.block_tokens = count, block_tokens
        self._returned: list[int] = []
        self._fresh = 0
        """The lowest block that nobody ever had: `count` may be far more than a list could hold."""
        self._tables: dict[SequenceId, list[int]] = {}

    @property
    def free(self) -> int:
        return self.count - self._fresh + len(self._returned)

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
        if missing > self.free:
            raise self._too_few(missing)
        for _ in range(missing):
            table.append(self._take())
        for _ in range(-missing):
            self._returned.append(table.pop())
        self._tables[sequence] = table
        return tuple(table)

    def resize_all(self, lengths: Mapping[SequenceId, int]) -> dict[SequenceId, tuple[int, ...]]:
        """`resize` several sequences, or none of them: what some give back the others may have."""
        missing = {sequence: self.needed(tokens) - len(self.table(sequence)) for sequence, tokens in lengths.items()}
        if sum(missing.values()) > self.free:
            raise self._too_few(sum(missing.values()))
        return {
            sequence: self.resize(sequence, lengths[sequence]) for sequence in sorted(missing, key=missing.__getitem__)
        }

    def release(self, sequence: SequenceId) -> None:
        """Take back all blocks of a sequence; unknown ones are ignored."""
        self._returned.extend(reversed(self._tables.pop(sequence, [])))

    def _take(self) -> int:
        if self._returned:
            return self._returned.pop()
        self._fresh += 1
        return self._fresh - 1

    def _too_few(self, missing: int) -> KvBudgetError:
        return KvBudgetError(
            f"{missing} more KV blocks of {self.block_tokens} tokens needed, {self.free} of {self.count} free"
        )
