"""What a step may ask for, and where its rows lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.engine.step import Entry, Lengths, Step
from meshinfer.errors import StepError
from meshinfer.types import SequenceId

A, B = SequenceId(1), SequenceId(2)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([Entry(A, 5, 0)], "0 positions from 5 is no work"),
        ([Entry(A, 5, -1)], "-1 positions from 5 is no work"),
        ([Entry(A, -1, 2)], "2 positions from -1 is no work"),
        ([Entry(A, 6, 1)], "has 5 positions and cannot start at 6"),
        ([Entry(B, 1, 1)], "has 0 positions and cannot start at 1"),
        ([Entry(A, 5, 1), Entry(B, 0, 1), Entry(A, 6, 1)], "is in the step twice"),
        ([Entry(A, 5, 2, rows=(2,))], "rows outside its 2 positions"),
        ([Entry(A, 5, 2, rows=(0, -1))], "rows outside its 2 positions"),
    ],
)
def test_a_contradiction_is_refused(entries: list[Entry], complaint: str) -> None:
    lengths = Lengths(held={A: 5})
    with pytest.raises(StepError, match=complaint):
        lengths.check(entries)
    assert lengths.held == {A: 5}


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_a_sequence_goes_on_or_back(start: int) -> None:
    lengths = Lengths(held={A: 5})
    entries = [Entry(A, start, 2), Entry(B, 0, 3)]
    lengths.check(entries)
    lengths.advance(entries)
    assert lengths.held == {A: start + 2, B: 3}


def test_state_that_cannot_go_back_may_go_on_or_begin_anew() -> None:
    lengths = Lengths(rewinds=False, held={A: 5})
    lengths.check([Entry(A, 5, 1)])
    lengths.check([Entry(A, 0, 3)])
    for start in (1, 4):
        with pytest.raises(StepError, match=f"cannot go back to {start}"):
            lengths.check([Entry(A, start, 1)])


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 9)).flatmap(
            lambda span: st.tuples(st.just(span[0]), st.just(span[1]), st.lists(st.integers(0, span[1] - 1)))
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_and_positions_belong_to_their_entries(spans: list[tuple[int, int, list[int]]]) -> None:
    step = Step(tuple(Entry(SequenceId(n), *span[:2], tuple(span[2])) for n, span in enumerate(spans)))
    flat = [(n, start + offset) for n, (start, count, _) in enumerate(spans) for offset in range(count)]
    assert step.total == len(flat)
    assert step.positions.dtype == step.rows.dtype == np.int64
    assert step.positions.tolist() == [position for _, position in flat]
    wanted = [(n, start + row) for n, (start, _, rows) in enumerate(spans) for row in rows]
    assert [flat[row] for row in step.rows] == wanted
