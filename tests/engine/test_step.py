"""What a stage accepts, and where the rows of a step lie."""

from __future__ import annotations

import numpy as np
import pytest

from meshinfer.engine.step import Entry, Lengths, Step, StepError
from meshinfer.types import SequenceId

A, B = SequenceId(1), SequenceId(2)


def test_rows_and_positions_follow_the_entries() -> None:
    step = Step((Entry(A, 5, 3, rows=(0, 2)), Entry(B, 0, 2, rows=(1,))))
    assert step.total == 5
    assert step.rows.tolist() == [0, 2, 4]
    assert step.positions.tolist() == [5, 6, 7, 0, 1]
    assert step.rows.dtype == step.positions.dtype == np.int64


def test_a_sequence_grows_and_goes_back() -> None:
    lengths = Lengths({})
    for start, count in ((0, 4), (4, 1), (2, 3), (0, 1)):
        entry = Entry(A, start, count)
        lengths.check([entry])
        lengths.advance([entry])
        assert lengths.held[A] == start + count


@pytest.mark.parametrize(
    "entries",
    [
        [Entry(A, 5, 1)],
        [Entry(A, 4, 0)],
        [Entry(A, -1, 2)],
        [Entry(A, 4, 1), Entry(A, 5, 1)],
        [Entry(A, 4, 2, rows=(2,))],
        [Entry(A, 4, 2, rows=(-1,))],
        [Entry(B, 1, 1)],
    ],
)
def test_work_that_does_not_fit_is_refused(entries: list[Entry]) -> None:
    lengths = Lengths({A: 4})
    with pytest.raises(StepError):
        lengths.check(entries)
    assert lengths.held == {A: 4}


def test_without_rewind_a_sequence_can_only_go_on_or_start_again() -> None:
    lengths = Lengths({A: 4}, rewinds=False)
    lengths.check([Entry(A, 4, 1)])
    lengths.check([Entry(A, 0, 1)])
    with pytest.raises(StepError):
        lengths.check([Entry(A, 3, 1)])
