"""How much room an answer has."""

from __future__ import annotations

import pytest

from meshinfer.engine.generate import answer_room
from meshinfer.errors import ContextLengthError, InputError


def test_an_answer_ends_with_the_context() -> None:
    assert answer_room(10, 100, 5) == 5
    assert answer_room(98, 100, 5) == 2


@pytest.mark.parametrize("prompt", [100, 101])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(prompt: int) -> None:
    with pytest.raises(ContextLengthError, match=f"{prompt} .* 100"):
        answer_room(prompt, 100, 5)


def test_nothing_to_do_is_an_input_error() -> None:
    with pytest.raises(InputError):
        answer_room(10, 100, 0)
    with pytest.raises(InputError):
        answer_room(0, 100, 5)
