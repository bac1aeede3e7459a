"""Stop strings: where an answer ends because it says one of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text that comes in pieces before the first stop string, wherever the pieces part.

    What might be the beginning of a stop string is held back. The stop string that is complete first wins; of two
    that end together, the longer. All that `push` and `flush` return, joined, is the text before it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """An empty stop string would end every answer before it begins: it is ignored."""
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._hit = False

    def push(self, text: str) -> tuple[str, bool]:
        """What of the text so far can be shown now, and whether a stop string ended it; after that nothing comes."""
        if self._hit:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._hit, self._held = True, ""
            return text[: min(found)[1]], True
        cut = len(text) - self._beginning_at_the_end_of(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, at the end of the answer: it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_the_end_of(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
