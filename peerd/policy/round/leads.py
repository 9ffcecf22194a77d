"""The members that wait for others in a round: their parts or sums are ahead of the slowest ones.

A member sends up to a window ahead of the slowest part of each slice, and its sums as soon as they are complete. So members with spare
uplink are ahead, and those for which the round waits are not. What a member sends shows the rate of its line only if it does not wait:
who waits might have sent more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from peerd.policy.round.chunks import WINDOW

WAITS = 0.3 * WINDOW
"""Chunks by which the parts, or the sums, of a member are ahead in the mean, if it waits for others. A simulation of lines of one rate has
0 to 1; daemons whose beats come at different moments may show more, for all members alike."""
GROWTH = 1.5
"""By which factor the bound of a member's rate rises for each round in which it waited: it gets a larger slice until it waits no more. And
how many times as fast as in a round that was not as planned a member is believed to be at most."""
OTHER_LINE = 0.5
"""A member that sends at less than this share of its rate so far has another line now: what was seen of it before counts no more."""
OTHER_LINES = 2.0
"""Nor does what is known of any member, once a round took so many times as long as expected, or so many times less."""


class SentRate(NamedTuple):
    """What a round has shown of a member's uplink."""

    rate: float
    """Bytes per second."""
    waited: bool = False
    """Whether it waited for others, so that the line may be faster."""


class Leads:
    """Members are numbered as in the roster; `sizes`: the chunks of each member's slice."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._ahead = [[0, 0] for _ in sizes]
        """By member: chunks by which its parts, and its sums, were ahead of the slowest ones, in all that was told."""
        self._count = [[0, 0] for _ in sizes]

    def told(self, teller: int, parts: Sequence[int], sums: Sequence[int]) -> None:
        """Take how many chunks a member says that it has: of each other member's part of its own slice, and of their sums.

        Who reduces a large slice is behind with its sums, and who has a slow line with both.
        """
        if len(parts) != len(self._sizes) or len(sums) != len(self._sizes):
            return
        others = [member for member in range(len(self._sizes)) if member != teller]
        self._compare(0, {author: (parts[author], self._sizes[teller]) for author in others if self._sizes[teller]})
        self._compare(1, {reducer: (sums[reducer], self._sizes[reducer]) for reducer in others if self._sizes[reducer]})

    def _compare(self, kind: int, told: Mapping[int, tuple[int, int]]) -> None:
        here = {member: min(max(chunks, 0), size) for member, (chunks, size) in told.items()}
        least = min(here.values(), default=0)
        if not any(here.values()) or all(chunks == told[member][1] for member, chunks in here.items()):
            return
        for member, chunks in here.items():
            self._ahead[member][kind] += min(chunks - least, WINDOW)
            self._count[member][kind] += 1

    def waited(self, member: int) -> bool:
        """Whether the member waited for others most of the time."""
        return any(ahead > WAITS * count for ahead, count in zip(self._ahead[member], self._count[member], strict=True))


class KnownLine(NamedTuple):
    """What rounds so far have shown of a member's uplink."""

    rate: float
    """Bytes per second: its rate, or if it waited a bound of it."""
    waits: bool = False
    """Whether it waited in the last round."""
    least: float = 0.0
    """The most that its records have said while it waited."""


def line_after(known: KnownLine | None, sent: SentRate, claim: float | None = None, is_as_planned: bool = True) -> KnownLine:
    """What is known of a member's uplink after a round; `known`: before it, `claim`: what its record says.

    What a member that waited has sent follows from its slice, and not from its line. It shows a bound only if there was one before. What
    such a member measures of itself falls from round to round, so the most that it has said counts. A round that was not as planned
    had chunks for other lines and may have filled none: a record counts beside it, up to GROWTH times what the member has sent.
    """
    if sent.waited:
        bound, least = (math.inf, 0.0) if known is None else (max(GROWTH * known.rate, sent.rate), known.least)
        return KnownLine(bound, waits=True, least=max(least, claim or 0.0))
    if not is_as_planned:
        return KnownLine(max(sent.rate, min(claim or 0.0, GROWTH * sent.rate)))
    before = known.rate if known is not None and known.rate < math.inf else sent.rate
    return KnownLine(sent.rate if sent.rate < OTHER_LINE * before else (before + sent.rate) / 2)


def believed_ups(claims: Sequence[float | None], known: Sequence[KnownLine | None]) -> list[float | None]:
    """The uplinks of members in bytes per second, by what their records say (None: nothing) and by what rounds have shown.

    A round for which a member did not wait shows its rate. One that waited is as fast as it says, or as the fastest that did not wait: what
    a member measures of itself while it waits is less than its line. So unlike slices alone never make equal lines look unlike.
    """
    fastest = max((line.rate for line in known if line is not None and not line.waits), default=0.0)
    found: list[float | None] = []
    for claim, line in zip(claims, known, strict=True):
        if line is None or not line.waits:
            found.append(claim if line is None else line.rate)
        else:
            told = max(claim or 0.0, line.least, fastest)
            found.append(min(told, line.rate) if told else None)
    return found


def is_as_expected(took_s: float, expected_s: float, averaging_s: float) -> bool:
    """Whether a round fits what was believed of its members' lines; one that is short, and was to be, tells nothing of them.

    No round takes less time than its lines need. So where one took far less than expected, some line was believed to be too slow; as rounds
    that are short show no rates, nothing else would ever correct that.
    """
    longer_s, shorter_s = max(took_s, expected_s), min(took_s, expected_s)
    return longer_s <= max(OTHER_LINES * shorter_s, averaging_s)
