"""Who waits for others in a round: whose parts are ahead of the slowest ones, wherever they go.

A member sends up to a window ahead of the slowest part of each slice. So the parts of members with spare uplink are ahead, and those of the
members for which the round waits are not. What a member sends shows the rate of its line only if it does not wait: who waits might have
sent more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peerd.policy.round.chunks import WINDOW

WAITS = 0.3 * WINDOW
"""Chunks by which the parts of a member are ahead in the mean, if it waits for others. With lines of one rate these are 0 to 1."""
GROWTH = 1.5
"""By which factor more is believed of the line of a member that waited. It gets a larger slice until it waits no more."""
OTHER_LINE = 0.5
"""A member that sent at less than this share of its rate so far has another line now: earlier rounds do not count any more."""
OTHER_LINES = 2.0
"""Nor does what is known of any member, once a round took so many times as long as expected."""


class SentRate(NamedTuple):
    """What a round has shown of a member's uplink."""

    rate: float
    """Bytes per second."""
    waited: bool = False
    """Whether it waited for others, so that the line may be faster."""
    is_as_expected: bool = True
    """Whether the round took about as long as what was believed of lines before."""


class Leads:
    """Members are numbered as in the roster."""

    def __init__(self, num_members: int) -> None:
        self._ahead, self._count = [0] * num_members, [0] * num_members

    def told(self, reducer: int, parts: Sequence[int], num_chunks: int) -> None:
        """Take how many chunks a reducer of `num_chunks` says that it has of each member's part."""
        others = [author for author in range(len(self._ahead)) if author != reducer]
        if len(parts) != len(self._ahead) or not others:
            return
        here = {author: min(max(parts[author], 0), num_chunks) for author in others}
        least = min(here.values())
        if least == num_chunks or not any(here.values()):
            return
        for author, chunks in here.items():
            self._ahead[author] += min(chunks - least, WINDOW)
            self._count[author] += 1

    def waited(self, member: int) -> bool:
        """Whether the member waited for others most of the time."""
        return self._ahead[member] > WAITS * self._count[member]


def line_after(known: float | None, sent: SentRate) -> float:
    """The rate of a member's uplink as believed after a round; `known`: as believed before."""
    if not sent.is_as_expected:
        known = None
    if sent.waited:
        return max(known or 0.0, GROWTH * sent.rate)
    return sent.rate if known is None or sent.rate < OTHER_LINE * known else (known + sent.rate) / 2


def is_as_expected(took_s: float, expected_s: float, averaging_s: float) -> bool:
    """Whether a round fits what was believed of its members' lines; one that is short tells nothing of them."""
    return took_s <= max(OTHER_LINES * expected_s, averaging_s)
