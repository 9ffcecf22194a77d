"""Which texts a peer keeps keys and values of, within a bound of bytes and of time. Pure.

A session is one text that one asker goes on with. A dropped session is no loss but of time: its asker sends the text again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from peerd.table.record import PeerId

SessionId = tuple[PeerId, bytes]
"""The asker, as its connection proves it, and the number that it chose: nobody reaches another asker's session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    most_bytes: int
    """Of all sessions together."""
    most_each: int = 8
    """Sessions of one asker: as many as `peerd serve-api` answers at once."""
    most: int = 64
    unused_s: float = 120.0
    """A session that has not been used for so long ends."""


@dataclass(slots=True)
class _Session:
    step: int
    used_s: float
    num_bytes: int = 0
    is_busy: bool = False


class Sessions:
    """The sessions of one stage. Times are seconds on the caller's clock, which never goes back."""

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self._sessions: dict[SessionId, _Session] = {}

    @property
    def num_bytes(self) -> int:
        return sum(session.num_bytes for session in self._sessions.values())

    @property
    def ids(self) -> frozenset[SessionId]:
        return frozenset(self._sessions)

    def step_of(self, session: SessionId) -> int | None:
        """The step whose parameters this session is of; None if there is no such session."""
        found = self._sessions.get(session)
        return None if found is None else found.step

    def begin(self, session: SessionId, step: int, num_bytes: int, now_s: float) -> str:
        """Begin to compute `session` with the parameters of `step`, after which it will take about `num_bytes`.

        Returns the reason to refuse; empty if it was begun. A session of another step begins anew. `make_room` follows, then `end_pass`.
        """
        if num_bytes > self.limits.most_bytes:
            return "the text is longer than this peer has memory for"
        found = self._sessions.get(session)
        if found is not None and found.is_busy:
            return "this text is being computed already"
        busy_bytes = sum(each.num_bytes for each in self._sessions.values() if each.is_busy)
        if busy_bytes + num_bytes > self.limits.most_bytes:
            return "the memory for texts is taken by texts that are being computed"
        if found is None:
            if sum(asker == session[0] and each.is_busy for (asker, _), each in self._sessions.items()) >= self.limits.most_each:
                return f"you have {self.limits.most_each} texts being computed already"
            if sum(each.is_busy for each in self._sessions.values()) >= self.limits.most:
                return f"{self.limits.most} texts are being computed already"
        self._sessions[session] = _Session(step, now_s, num_bytes, is_busy=True)
        return ""

    def end_pass(self, session: SessionId, num_bytes: int | None, now_s: float) -> None:
        """Note the end of a pass, after which the session takes `num_bytes`; None: the pass failed, and the session is gone."""
        found = self._sessions.get(session)
        if found is None:
            return
        if num_bytes is None:
            del self._sessions[session]
        else:
            found.num_bytes, found.used_s, found.is_busy = num_bytes, now_s, False

    def end(self, session: SessionId) -> None:
        self._sessions.pop(session, None)

    def make_room(self, now_s: float, kept_steps: frozenset[int] | None = None) -> list[SessionId]:
        """End what is unused, of a step whose parameters are gone, or beyond the bounds. Returns what was ended, never a busy session.

        Beyond the bounds, the asker whose sessions take the most gives up that one which it has not used for longest.
        """
        ended = [
            key
            for key, each in self._sessions.items()
            if not each.is_busy and (now_s - each.used_s > self.limits.unused_s or (kept_steps is not None and each.step not in kept_steps))
        ]
        for key in ended:
            del self._sessions[key]
        while (over := self._over()) is not None:
            ended.append(over)
            del self._sessions[over]
        return ended

    def _over(self) -> SessionId | None:
        """The session to give up, while there is too much."""
        free = {key: each for key, each in self._sessions.items() if not each.is_busy}
        counts = Counter(asker for asker, _ in self._sessions)
        crowded = {key: each for key, each in free.items() if counts[key[0]] > self.limits.most_each}
        if not crowded and len(self._sessions) <= self.limits.most and self.num_bytes <= self.limits.most_bytes:
            return None
        held: Counter[PeerId] = Counter()
        for (asker, _), each in self._sessions.items():
            held[asker] += each.num_bytes
        among = crowded or free
        return min(among, key=lambda key: (-held[key[0]], among[key].used_s, key), default=None)
