"""The question of who may call this daemon, which its door and the Swarm service ask.

`swarm/access.py` answers; without it everybody may.
"""

from __future__ import annotations

from typing import Protocol

from peerd.config.access import RawList
from peerd.table.record import PeerId

TOLD_TO_ALL = frozenset({"Describe"})
"""Methods that also a banned peer may call: it takes no message of the caller, and its answer says why the others are refused."""
BEFORE_ADMISSION = frozenset({"Gossip", "Converse", "DialBack", "Sink", "Source"})
"""Methods that a peer may call that has not shown an invitation yet: to show it, and to find out whether it could take part."""


class Admission(Protocol):
    """The organiser's list as this daemon has it, and who has been invited."""

    @property
    def version(self) -> bytes:
        """Which list it is (`version_of` in policy/swarm/access.py); empty: there is none."""
        ...

    @property
    def invitation(self) -> bytes:
        """This peer's own invitation; empty: it has none, or needs none."""
        ...

    def check(self, caller: PeerId, *, is_to_show: bool = False) -> None:
        """Raise UnwelcomeError for a banned peer, and for one that is not invited unless the call is to show its invitation."""
        ...

    def show(self, caller: PeerId, invitation: bytes) -> None:
        """Note an invitation that a peer has shown. One that does not hold changes nothing."""
        ...

    def take(self, raw: RawList) -> bool:
        """Take a list that somebody has sent. Returns whether it is new. Raises BadMessageError if the organiser has not signed it."""
        ...

    def newer_than(self, version: bytes) -> RawList | None:
        """The list, if it is newer than one of this version."""
        ...


class Everybody:
    """Admits all callers, and knows no list."""

    version = b""
    invitation = b""

    def check(self, caller: PeerId, *, is_to_show: bool = False) -> None: ...

    def show(self, caller: PeerId, invitation: bytes) -> None: ...

    def take(self, raw: RawList) -> bool:
        return False

    def newer_than(self, version: bytes) -> RawList | None:
        return None
