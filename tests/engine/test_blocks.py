"""The pool of KV blocks: nothing is handed out twice, nothing gets lost, a refusal changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from meshinfer.engine.blocks import BlockPool
from meshinfer.errors import KvBudgetError
from meshinfer.types import SequenceId

COUNT, BLOCK_TOKENS, SEQUENCES = 12, 4, 5

sequences = st.integers(0, SEQUENCES - 1).map(SequenceId)
lengths = st.integers(0, (COUNT + 3) * BLOCK_TOKENS)


class Pool(RuleBasedStateMachine):
    """A pool beside the plainest account of how many blocks each sequence should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(COUNT, BLOCK_TOKENS)
        self.blocks: dict[SequenceId, int] = {}

    def tables(self) -> dict[SequenceId, tuple[int, ...]]:
        return {SequenceId(n): self.pool.table(SequenceId(n)) for n in range(SEQUENCES)}

    @rule(sequence=sequences, tokens=lengths)
    def resize(self, sequence: SequenceId, tokens: int) -> None:
        before, after = self.tables(), self.blocks | {sequence: -(-tokens // BLOCK_TOKENS)}
        try:
            handed_out = {sequence: self.pool.resize(sequence, tokens)}
        except KvBudgetError:
            self.refused(before, after)
        else:
            self.changed(before, after, handed_out)

    @rule(wanted=st.dictionaries(sequences, lengths))
    def resize_all(self, wanted: dict[SequenceId, int]) -> None:
        before = self.tables()
        after = self.blocks | {sequence: -(-tokens // BLOCK_TOKENS) for sequence, tokens in wanted.items()}
        try:
            handed_out = self.pool.resize_all(wanted)
        except KvBudgetError:
            self.refused(before, after)
        else:
            assert handed_out.keys() == wanted.keys()
            self.changed(before, after, handed_out)

    def refused(self, before: dict[SequenceId, tuple[int, ...]], after: dict[SequenceId, int]) -> None:
        assert sum(after.values()) > COUNT
        assert self.tables() == before

    def changed(
        self,
        before: dict[SequenceId, tuple[int, ...]],
        after: dict[SequenceId, int],
        handed_out: dict[SequenceId, tuple[int, ...]],
    ) -> None:
        assert sum(after.values()) <= COUNT
        self.blocks = after
        for sequence, table in handed_out.items():
            assert table == self.pool.table(sequence)
            kept = min(len(table), len(before[sequence]))
            assert table[:kept] == before[sequence][:kept], "blocks that stay keep their places"

    @rule(sequence=sequences)
    def release(self, sequence: SequenceId) -> None:
        self.pool.release(sequence)
        self.blocks.pop(sequence, None)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        tables = self.tables()
        held = [block for table in tables.values() for block in table]
        assert len(held) == len(set(held)) and set(held) <= set(range(COUNT))
        assert self.pool.free == COUNT - len(held)
        assert {sequence: len(table) for sequence, table in tables.items()} == dict.fromkeys(tables, 0) | self.blocks


TestPool = Pool.TestCase


@given(tokens=st.integers(0, 10_000), block_tokens=st.integers(1, 64))
def test_the_blocks_needed_just_hold_the_tokens(tokens: int, block_tokens: int) -> None:
    blocks = BlockPool(1, block_tokens).needed(tokens)
    assert (blocks - 1) * block_tokens < tokens <= blocks * block_tokens


def test_a_pool_without_a_limit_costs_nothing() -> None:
    pool = BlockPool(1 << 40, 32)
    assert pool.resize(SequenceId(1), 33) == (0, 1) and pool.free == (1 << 40) - 2


def test_a_refusal_says_what_is_missing() -> None:
    pool = BlockPool(2, 32)
    pool.resize(SequenceId(1), 1)
    with pytest.raises(KvBudgetError, match="2 more KV blocks of 32 tokens needed, 1 of 2 free"):
        pool.resize(SequenceId(2), 33)


def test_what_one_sequence_gives_back_another_may_have_in_the_same_step() -> None:
    pool = BlockPool(2, 4)
    pool.resize(SequenceId(1), 8)
    tables = pool.resize_all({SequenceId(2): 4, SequenceId(1): 4})
    assert {sequence: len(table) for sequence, table in tables.items()} == {1: 1, 2: 1}
