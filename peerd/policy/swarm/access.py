"""The rules of who may take part in a run: the organiser's list, and invitations where the run asks for them. T9 (access). Pure.

What is judged here is verified already: lists and invitations are signed by the organiser (config/access.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from peerd.policy.hashing import digest
from peerd.table.record import PeerId

MAX_LISTED = 1024
"""Peers on a list, allowed and banned together."""
MAX_REASON_CHARS = 120
MAX_NUMBER = 1 << 53
NO_END = 0
"""The end of an invitation that has none."""
ENDS_SOON_S = 3 * 24 * 3600.0
_NOBODY: Mapping[PeerId, str] = MappingProxyType({})


class AccessState(enum.Enum):
    """What a peer may do in a run, and why."""

    IN = "takes part"
    BANNED = "banned"
    UNINVITED = "not invited"
    ENDED = "its invitation has ended"


@dataclass(frozen=True, slots=True)
class AccessList:
    """The organiser's list. Of two the one with the higher number holds."""

    number: int = 0
    """0: the organiser has made none."""
    allowed: frozenset[PeerId] = frozenset()
    """Peers that need no invitation."""
    banned: Mapping[PeerId, str] = field(default_factory=lambda: _NOBODY)
    """Peers that take no part, each with the reason; it may be empty."""

    def __post_init__(self) -> None:
        if not 0 <= self.number <= MAX_NUMBER:
            raise ValueError(f"a list has a number between 0 and {MAX_NUMBER}")
        if len(self.allowed) + len(self.banned) > MAX_LISTED:
            raise ValueError(f"a list has room for {MAX_LISTED} peers")
        if both := self.allowed & self.banned.keys():
            raise ValueError(f"{min(both)} is both allowed and banned")
        if any(len(reason) > MAX_REASON_CHARS or not reason.isprintable() for reason in self.banned.values()):
            raise ValueError(f"a reason is a printable text of at most {MAX_REASON_CHARS} characters")

    def banning(self, peers: Iterable[PeerId], reason: str) -> AccessList:
        """The next list, with these peers banned."""
        added = dict.fromkeys(peers, reason)
        return replace(self, number=self.number + 1, allowed=self.allowed - added.keys(), banned={**self.banned, **added})

    def lifting(self, peers: Iterable[PeerId]) -> AccessList:
        """The next list, on which these peers are neither banned nor allowed."""
        lifted = frozenset(peers)
        banned = {peer: reason for peer, reason in self.banned.items() if peer not in lifted}
        return replace(self, number=self.number + 1, allowed=self.allowed - lifted, banned=banned)

    def allowing(self, peers: Iterable[PeerId]) -> AccessList:
        """The next list, with these peers allowed, and no longer banned."""
        added = frozenset(peers)
        return replace(self.lifting(added), allowed=self.allowed | added)


NO_LIST = AccessList()


NO_VERSION = b""


def version_of(listed: AccessList, body: bytes) -> bytes:
    """T9 (access): the place of a list in the order of all. The greater one holds: it has the higher number.

    Two lists of one number, which an organiser may make on two machines, have an order as well, so that all peers keep the same one.
    """
    return listed.number.to_bytes(8, "big") + digest(body)[:8] if listed.number else NO_VERSION


def standing_of(peer: PeerId, listed: AccessList, *, by_invitation: bool, invited_until_s: float | None, now_s: float) -> AccessState:
    """T9 (access): what a peer may do. A ban goes before everything else.

    `invited_until_s` is the end of its invitation, as a wall clock tells it; None: it has shown none. `now_s` is of that clock.
    """
    if peer in listed.banned:
        return AccessState.BANNED
    if not by_invitation or peer in listed.allowed:
        return AccessState.IN
    if invited_until_s is None:
        return AccessState.UNINVITED
    return AccessState.IN if has_not_ended(invited_until_s, now_s) else AccessState.ENDED


def has_not_ended(until_s: float, now_s: float) -> bool:
    return until_s == NO_END or now_s < until_s


def ends_later(until_s: float, other_s: float | None) -> bool:
    """Whether an invitation lasts longer than another one of the same peer, or is the only one."""
    return other_s is None or (other_s != NO_END and (until_s == NO_END or until_s > other_s))


def ends_soon(until_s: float | None, now_s: float) -> bool:
    """Whether a peer should ask for another invitation by now."""
    return until_s is not None and until_s != NO_END and until_s - now_s < ENDS_SOON_S
