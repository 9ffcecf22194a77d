"""The verdict on wall clocks that differ: this machine's is wrong, or another peer's.

One peer that differs proves nothing. The largest group of clocks that agree is taken to be right; if two are equally large, none is.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from peerd.table.record import PeerId

MAX_CLOCK_OFFSET_S = 3.0
"""DHT records carry wall-clock expiry, so clocks must agree within a few seconds."""
MOST_ASKED = 5
SET_IT = "set it, for instance by switching on NTP"


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far this machine's clock is ahead of a peer's, which is known to half a round trip."""

    peer: PeerId
    offset_s: float
    round_trip_s: float

    @classmethod
    def told(cls, peer: PeerId, told_s: float, now_s: float, round_trip_s: float) -> ClockOffset:
        """From the peer's answer that has just come. `now_s` is read once, since a clock may be set while the peer is asked."""
        return cls(peer, now_s - round_trip_s / 2 - told_s, round_trip_s)

    @property
    def is_off(self) -> bool:
        return self.differs_from(0.0)

    def differs_from(self, offset_s: float) -> bool:
        return abs(self.offset_s - offset_s) > MAX_CLOCK_OFFSET_S + self.round_trip_s / 2


class Whose(enum.Enum):
    """The machine whose clock is off."""

    NOBODYS = "nobody's"
    MINE = "this machine's"
    THEIRS = "some peers'"
    UNKNOWN = "nobody knows"


@dataclass(frozen=True, slots=True)
class ClockVerdict:
    """`title` and `remedy` say it in words; they are empty where all agree."""

    whose: Whose
    title: str = ""
    remedy: str = ""


AGREED = ClockVerdict(Whose.NOBODYS)


def judge_clocks(offsets: Sequence[ClockOffset]) -> ClockVerdict:
    """Compare this machine's clock with those of the peers asked."""
    far = [each for each in offsets if each.is_off]
    if not far:
        return AGREED
    others = max(([each for each in far if not each.differs_from(one.offset_s)] for one in far), key=len)
    mine, apart_s = 1 + len(offsets) - len(far), sorted(each.offset_s for each in others)[len(others) // 2]
    apart = f"{span(apart_s)} {'ahead of' if apart_s > 0 else 'behind'}"
    if len(others) > mine:
        return ClockVerdict(Whose.MINE, f"this machine's clock is {apart} those of {len(others)} peers, which agree", SET_IT)
    if mine > len(others):
        whom = f"{far[0].peer}'s" if len(far) == 1 else f"those of {len(far)} peers"
        title = f"this machine's clock is {apart} {whom}, and agrees with those of {mine - 1} others"
        return ClockVerdict(Whose.THEIRS, title, "nothing to do here: their owners have to set theirs")
    whom = f"{others[0].peer}'s" if len(others) == 1 else f"those of {len(others)} peers"
    remedy = "check this machine's time service (NTP), and have it checked there: one of the two is off"
    return ClockVerdict(Whose.UNKNOWN, f"this machine's clock is {apart} {whom}, and no other peer tells whose is right", remedy)


def span(seconds: float) -> str:
    """A difference of clocks in words."""
    for unit, size_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if abs(seconds) >= 2 * size_s:
            return f"{abs(seconds) / size_s:.1f} {unit}"
    return f"{abs(seconds):.1f} s"
