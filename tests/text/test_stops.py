"""Stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.text.stops import StopStrings

SHORT = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the text before the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def through(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    cutter = StopStrings(stops)
    shown, hit = "", False
    for piece in pieces:
        text, hit = cutter.push(piece)
        shown += text
    return shown + cutter.flush(), hit


@given(st.lists(SHORT, max_size=6), STOPS)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    assert through(pieces, stops) == cut("".join(pieces), stops)


@given(st.lists(SHORT, max_size=6), STOPS)
def test_no_more_is_held_back_than_the_beginning_of_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    cutter, shown, whole = StopStrings(stops), "", ""
    for piece in pieces:
        whole += piece
        text, hit = cutter.push(piece)
        shown += text
        if hit:
            return
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["one\nt", "wo"], ["\n"], "one"),
        (["EN", "D"], ["END"], ""),
        (["ENE", "ND!"], ["END"], "EN"),
        (["abcd"], ["abcd", "bc"], "a"),
        (["xabc"], ["bc", "abc"], "x"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: str) -> None:
    assert through(pieces, stops) == (shown, True)


def test_text_is_shown_as_soon_as_it_cannot_be_a_stop_string() -> None:
    cutter = StopStrings(["END"])
    assert cutter.push("the EN") == ("the ", False)
    assert cutter.push("T") == ("ENT", False)
    assert cutter.push("E") == ("", False)
    assert cutter.flush() == "E"


def test_nothing_comes_after_a_stop_string() -> None:
    cutter = StopStrings(["."])
    assert cutter.push("a. b") == ("a", True)
    assert cutter.push("c") == ("", True)
    assert cutter.flush() == ""


def test_without_stop_strings_everything_goes_through() -> None:
    assert through(["a", "b"], []) == ("ab", False)
    assert through(["a", "b"], [""]) == ("ab", False)
