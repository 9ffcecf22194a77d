"""Guesses how a text goes on, so that several tokens take one way through the stages (speculative decoding, by what the text says before).

The stages compute the guessed tokens along with the last known one, and the last stage tells what follows each. A guess counts only where
it is the token that was chosen: the text is the same as without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_DRAFTED = 8
"""Guessed tokens in one pass."""
FIRST_DRAFTED = 4
LENGTHS = (4, 3, 2)
"""What followed the last so many tokens where they stood before is the guess; the longest that is found counts."""


class Drafts:
    """Guesses for one text: one more than were right the last time, and twice as many where all were right."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """Some tokens in a row -> the position after the place where they stood last."""
        self._num_seen = 0
        self._limit = FIRST_DRAFTED

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow. `tokens` begins with those of the call before."""
        for end in range(self._num_seen + 1, len(tokens)):  # what follows the last tokens is not known
            for length in LENGTHS:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._num_seen = max(self._num_seen, len(tokens) - 1)
        begins = (self._after.get(tuple(tokens[-length:])) for length in LENGTHS)
        begin = next((each for each in begins if each is not None), None)
        known = [*tokens]
        if begin is not None:
            for place in range(begin, begin + min(most, self._limit)):
                known.append(known[place])
        return known[len(tokens) :]

    def judge(self, guessed: Sequence[int], chosen: Sequence[int]) -> int:
        """How many of the guessed tokens are those that were chosen, up to the first that is not."""
        right = next((number for number, (ours, due) in enumerate(zip(guessed, chosen, strict=False)) if ours != due), len(guessed))
        if guessed:
            self._limit = min(MOST_DRAFTED, 2 * self._limit if right == len(guessed) else right + 1)
        return right
