"""Tokens to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshinfer.text.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 16


class Detokenizer:
    """One answer's text. All that `push` and `flush` return, joined, is the text of all tokens.

    Tokens are decoded together with the ones before them, because what a token looks like depends on its
    neighbours (spaces, characters of several bytes), and only what is new is returned.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = 0
        """How many of `_ids` have been returned; the others are held."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(self._push_one(number) for number in ids)

    def flush(self) -> str:
        """The rest, at the end of the answer; an unfinished character becomes U+FFFD."""
        text = self._new_text()
        self._ids, self._emitted = [], 0
        return text

    def _push_one(self, number: int) -> str:
        self._ids.append(number)
        text = self._new_text()
        if text.endswith(_UNFINISHED) and len(self._ids) - self._emitted < _MAX_HELD:
            return ""
        self._ids, self._emitted = self._ids[self._emitted :], len(self._ids) - self._emitted
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._emitted])
        return self._tokenizer.decode(self._ids)[len(before) :]
