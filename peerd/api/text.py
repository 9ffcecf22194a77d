"""Turns tokens into pieces of text that may be sent at once: no half characters, and nothing of a text at which the answer ends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of half a character are decoded to."""


class TextStream:
    """The answer to one request."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._tokens: list[int] = []
        self._sent = 0
        self.has_stopped = False
        """Whether one of the texts has come at which the answer ends."""

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> str:
        """The text that may be sent now; it may be empty."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        ends = [place for place in (text.find(stop, max(0, self._sent - len(stop))) for stop in self._stops) if place >= self._sent]
        if ends:
            self.has_stopped = True
            return self._piece(text, min(ends))
        whole = len(text.rstrip(UNKNOWN))
        return self._piece(text, min([whole, *(whole - _begun(text[:whole], stop) for stop in self._stops)]))

    def rest(self) -> str:
        """What was held back, where no more tokens come."""
        text = self._decode(self._tokens)
        return "" if self.has_stopped else self._piece(text, len(text))

    def _piece(self, text: str, end: int) -> str:
        begin, self._sent = self._sent, max(self._sent, end)
        return text[begin : self._sent]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of `stop`."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
