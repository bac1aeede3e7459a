"""No block is given twice, none is lost, and a request that cannot be met changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from meshinfer.engine.blocks import BlockPool
from meshinfer.errors import KvBudgetError
from meshinfer.types import SequenceId

COUNT, BLOCK_TOKENS = 12, 4
sequences = st.integers(0, 4).map(SequenceId)


class Pool(RuleBasedStateMachine):
    """The pool beside a dictionary of how many tokens each sequence should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(COUNT, BLOCK_TOKENS)
        self.tokens: dict[SequenceId, int] = {}

    @rule(sequence=sequences, tokens=st.integers(0, 60))
    def resize(self, sequence: SequenceId, tokens: int) -> None:
        before = {known: self.pool.table(known) for known in self.tokens}
        others = sum(-(-count // BLOCK_TOKENS) for known, count in self.tokens.items() if known != sequence)
        if others + -(-tokens // BLOCK_TOKENS) > COUNT:
            with pytest.raises(KvBudgetError):
                self.pool.resize(sequence, tokens)
            assert {known: self.pool.table(known) for known in self.tokens} == before
            return
        table = self.pool.resize(sequence, tokens)
        kept = min(len(table), len(before.get(sequence, ())))
        assert table[:kept] == before.get(sequence, ())[:kept], "blocks that stay keep their places"
        self.tokens[sequence] = tokens

    @rule(sequence=sequences)
    def release(self, sequence: SequenceId) -> None:
        self.pool.release(sequence)
        self.tokens.pop(sequence, None)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        tables = [self.pool.table(sequence) for sequence in self.tokens]
        given = [block for table in tables for block in table]
        assert len(given) == len(set(given))
        assert set(given) <= set(range(COUNT))
        assert len(given) + self.pool.free == COUNT
        for sequence, tokens in self.tokens.items():
            assert len(self.pool.table(sequence)) == -(-tokens // BLOCK_TOKENS)


TestPool = Pool.TestCase
