"""Streaming text, for every way the tokens may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.config import Folders
from meshinfer.text.detokenizer import Detokenizer
from meshinfer.text.tokenizer import Tokenizer, load_tokenizer
from tests.sources.makers import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(make_tokenizer(folder), Folders(folder / "home"))


def pieces(tokenizer: Tokenizer, groups: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


@given(text=st.text(max_size=40), sizes=st.lists(st.integers(0, 5), max_size=40))
def test_the_pieces_are_the_text_and_none_has_half_a_character(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special=False)
    groups, start = [], 0
    for size in sizes:
        groups.append(ids[start : start + size])
        start += size
    found = pieces(tokenizer, [*groups, ids[start:]])
    expected = tokenizer.decode(ids)
    assert "".join(found) == expected
    assert "".join(found).count("\ufffd") == text.count("\ufffd")


@given(ids=st.lists(st.integers(0, 261), max_size=60))
def test_any_tokens_at_all_give_the_text_of_all_tokens(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, [[number] for number in ids])) == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂!", add_special=False)
    assert len(ids) == 5
    assert pieces(tokenizer, [[number] for number in ids]) == ["", "", "", "🙂", "!", ""]


def test_an_unfinished_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂", add_special=False)[:-1]
    assert pieces(tokenizer, [ids]) == ["a", "\ufffd"]


def test_bytes_that_never_make_a_character_are_not_held_forever(tokenizer: Tokenizer) -> None:
    (lone,) = [n for n in range(2, 258) if tokenizer.decode([n, n]) == "\ufffd\ufffd"][:1]
    found = pieces(tokenizer, [[lone]] * 100)
    assert "".join(found) == "\ufffd" * 100
    assert "".join(found[:-1]) != ""


def test_a_detokenizer_can_be_flushed_more_than_once(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.flush() == ""
    assert detokenizer.push([261]) == "hello"
    assert detokenizer.flush() == ""
