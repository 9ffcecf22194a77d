"""How much of its time a peer computes for those who ask the model something, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from peerd.table.record import PeerId

BURST_S = 0.5
"""So much computing time may be saved up: an answer comes at once where nobody has asked for a while."""
DEBT_S = 0.1
"""Passes that begin in idle moments may hold training up for so much more than the share: training's work may come while one runs."""
FORGOTTEN_S = 3600.0
"""An asker's past counts for so long."""
WINDOW_S = 60.0
LEAST_WAIT_S = 1e-3


def held_up_s(began_s: float, ended_s: float, waits_since_s: float | None) -> float:
    """For how long a pass of a text held training up: the part of the pass in which training's work waited, from `waits_since_s` on.

    None: none waited when the pass ended.
    """
    return 0.0 if waits_since_s is None else max(0.0, ended_s - max(began_s, waits_since_s))


class TimeShare:
    """For which share of the time training may wait for texts. Within it, a pass goes before training's work; beyond it, the pass waits for
    an idle moment. What is computed while no work of training waits is not charged.

    In any span of T seconds training waits for at most share * T + BURST_S + DEBT_S and the last pass. Times are seconds on the caller's
    clock, which never goes back.
    """

    def __init__(self, share: float, now_s: float) -> None:
        """`share`: 0 for no passes at all, up to 1."""
        self.share = share
        self._saved_s = BURST_S
        self._since_s = now_s

    def set_share(self, share: float, now_s: float) -> None:
        self._save(now_s)
        self.share = share

    def wait_s(self, now_s: float, *, is_busy: bool) -> float | None:
        """Seconds until the next pass may begin: before training's work if `is_busy`, otherwise in a moment in which none waits.

        None: there is no next pass, because the owner has switched inference off.
        """
        if not self.share:
            return None
        self._save(now_s)
        return max(0.0, -(self._saved_s if is_busy else self._saved_s + DEBT_S) / self.share)

    def charge(self, seconds: float, now_s: float) -> None:
        """Note for how long a pass that has ended held training up."""
        self._save(now_s)
        self._saved_s -= seconds

    def _save(self, now_s: float) -> None:
        self._saved_s = min(BURST_S, self._saved_s + self.share * (now_s - self._since_s))
        self._since_s = now_s


@dataclass(slots=True)
class Turns:
    """The next pass is that of the asker who has had the least. One who comes late has no claim to what others had before.

    So while two askers wait all the time, what they get differs by no more than one pass of each.
    """

    _had_s: dict[PeerId, float] = field(default_factory=dict)
    """Computing time by asker, on a scale on which newcomers begin at `_level_s`."""
    _seen_s: dict[PeerId, float] = field(default_factory=dict)
    _level_s: float = 0.0

    def next_of(self, waiting: Iterable[PeerId], now_s: float) -> PeerId | None:
        """The asker whose turn it is; None if nobody waits. Those who do not wait save nothing up."""
        here = set(waiting)
        for asker in [asker for asker, seen_s in self._seen_s.items() if asker not in here and now_s - seen_s > FORGOTTEN_S]:
            del self._seen_s[asker], self._had_s[asker]
        for asker in here:
            self._had_s[asker] = max(self._had_s.get(asker, 0.0), self._level_s)
            self._seen_s[asker] = now_s
        if not here:
            return None
        chosen = min(here, key=lambda asker: (self._had_s[asker], asker))
        self._level_s = self._had_s[chosen]
        return chosen

    def took(self, asker: PeerId, seconds: float) -> None:
        """Note a pass for this asker."""
        if asker in self._had_s:
            self._had_s[asker] += seconds


@dataclass(slots=True)
class TokenRation:
    """How many tokens one asker may have: `each` a minute, and as many at once after a pause. Prompt and answer count, and replays, too.

    Nothing stays of an asker that has had nothing for a minute.
    """

    each: int
    _until_s: dict[PeerId, float] = field(default_factory=dict)
    """When each asker may have had its tokens, at its rate. The one that had some last is last."""

    def take(self, asker: PeerId, num_tokens: int, now_s: float) -> float:
        """Grant and count the tokens: returns 0. Otherwise counts nothing, and returns after how many seconds to ask again.

        Raises ValueError for more than can ever be granted. `now_s` never goes back.
        """
        if not 0 < num_tokens <= self.each:
            raise ValueError(f"at most {self.each} tokens at once")
        while self._until_s and self._until_s[first := next(iter(self._until_s))] <= now_s:
            del self._until_s[first]
        due_s = max(now_s, self._until_s.get(asker, now_s)) + WINDOW_S * num_tokens / self.each
        wait_s = due_s - WINDOW_S - now_s
        if wait_s > LEAST_WAIT_S:
            return wait_s
        self._until_s.pop(asker, None)
        self._until_s[asker] = due_s
        return 0.0
