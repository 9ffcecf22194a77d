"""The links of the members of a simulated round, and what becomes of them: faults are data. Members have numbers, times are seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peerd.policy.round.debts import Edge


@dataclass(frozen=True, slots=True)
class HomeLink:
    """A member's line, in bytes per second."""

    up: float
    down: float


@dataclass(frozen=True, slots=True)
class RateChange:
    """From `at_s` on a member's line has so many times the rate that it had at first."""

    at_s: float
    member: int
    up: float = 1.0
    down: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkBreak:
    """From `from_s` to `until_s` nothing passes between `member` and `other`, or between `member` and anybody (other -1)."""

    from_s: float
    until_s: float
    member: int
    other: int = -1

    def cuts(self, one: int, other: int) -> bool:
        return {self.member, self.other} == {one, other} if self.other >= 0 else self.member in (one, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLinks:
    """The lines of all members, and what goes wrong."""

    lines: Sequence[HomeLink]
    delay_s: Sequence[Sequence[float]]
    """One way, by sender and receiver."""
    dead: Collection[Edge] = ()
    """Ways that nothing passes."""
    changes: Sequence[RateChange] = ()
    breaks: Sequence[LinkBreak] = ()
    killed_s: Mapping[int, float] = field(default_factory=dict)
    tears: Collection[int] = ()
    """Members whose every chunk breaks at its end."""
    mute: Collection[int] = ()
    """Members that live and send no chunk."""
    deaf: Collection[int] = ()
    """Members that verify nothing of what they get."""
    secretive: Collection[int] = ()
    """Members that propose no round, close none and tell of no edge."""

    def passes(self, one: int, other: int, now_s: float) -> bool:
        """Whether anything passes from one to the other."""
        broken = any(each.from_s <= now_s < each.until_s and each.cuts(one, other) for each in self.breaks)
        return not broken and (one, other) not in self.dead


class Line:
    """One direction of a member's line, whose rate changes at some times."""

    def __init__(self, rate: float, changes: Sequence[tuple[float, float]]) -> None:
        """`changes`: (time, factor), sorted."""
        self._starts_s = [0.0, *(at_s for at_s, _ in changes)]
        self._rates = [rate, *(rate * factor for _, factor in changes)]

    def end_s(self, begin_s: float, num_bytes: float) -> float:
        """When so many bytes have passed that begin to pass at `begin_s`."""
        place = bisect_right(self._starts_s, begin_s) - 1
        now_s, left = begin_s, num_bytes
        for at_s, rate in zip(self._starts_s[place + 1 :], self._rates[place:], strict=False):
            if now_s + left / rate <= at_s:
                break
            left -= (at_s - now_s) * rate
            now_s, place = at_s, place + 1
        return now_s + left / self._rates[place]
