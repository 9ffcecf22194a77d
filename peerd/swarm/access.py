"""The access to a run, as this daemon knows it: the organiser's newest list, and the invitations that peers have shown.

`policy/swarm/access.py` judges. Here signatures are checked, and the list is kept on disk, so that a restart brings no older one back.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

import structlog

from peerd.config.access import INVITATION_BYTES, RawList, invited_until, list_on_disk, read_list, write_list
from peerd.errors import BadMessageError, DiskError, ShutOutError, UnwelcomeError
from peerd.policy.swarm.access import NO_LIST, NO_VERSION, AccessList, AccessState, ends_later, ends_soon, standing_of, version_of
from peerd.swarm.waking import Waiters
from peerd.table.record import PeerId, RunId
from peerd.unwritten import UNWRITTEN

MAX_INVITED = 1 << 15
"""Invitations that are remembered. They cost the organiser's word, so that nobody else can make many."""
ACCESS_LIST = "the organiser's list"
NO_RAW: RawList = (b"", b"")
LOG = structlog.get_logger()


class RunAccess:
    """The admission of one run. Without an organiser's key everybody may take part, and no list is taken."""

    def __init__(
        self, me: PeerId, run: RunId, organiser_key: bytes = b"", *, by_invitation: bool = False, kept_at: Path | None = None
    ) -> None:
        """`kept_at`: the file of the list; None: it is kept in memory alone."""
        self._me, self._run, self._key, self._kept_at = me, run, organiser_key, kept_at
        self.by_invitation = by_invitation and bool(organiser_key)
        self.listed: AccessList = NO_LIST
        self.raw: RawList = NO_RAW
        self.version = NO_VERSION
        self.invitation = b""
        self.refused = 0
        """Number of calls that were refused because their callers may not take part."""
        self._invited: OrderedDict[PeerId, int] = OrderedDict()
        """Until when each peer is invited, as its invitation says. The one that was shown last is the last."""
        self._waiters = Waiters()
        if kept_at is not None:
            self._read(kept_at)
        self.told = self.version
        """The list that others have been told of, or that this peer had before it began."""

    @property
    def number(self) -> int:
        return self.listed.number

    @property
    def invited_until_s(self) -> int | None:
        """The end of this peer's own invitation, in seconds since the epoch, 0 for none; None: it has no invitation."""
        return self._invited.get(self._me)

    @property
    def ends_soon(self) -> bool:
        """Whether this peer takes part by an invitation that ends soon."""
        is_needed = self.by_invitation and self._me not in self.listed.allowed
        return is_needed and ends_soon(self.invited_until_s, time.time())

    def standing(self, peer: PeerId) -> AccessState:
        """T9 (access): what a peer may do now."""
        until_s = self._invited.get(peer) if self.by_invitation else None
        return standing_of(peer, self.listed, by_invitation=self.by_invitation, invited_until_s=until_s, now_s=time.time())

    def is_banned(self, peer: PeerId) -> bool:
        return peer in self.listed.banned

    def admits(self, peer: PeerId) -> bool:
        return self.standing(peer) is AccessState.IN

    def check(self, caller: PeerId, *, is_to_show: bool = False) -> None:
        standing = self.standing(caller)
        if standing is AccessState.IN or (is_to_show and standing is not AccessState.BANNED):
            return
        self.refused += 1
        raise UnwelcomeError(f"this run's organiser does not let the caller take part: {standing.value}")

    def check_own(self) -> None:
        """Raise ShutOutError, with what its owner can do, if this peer may not take part."""
        standing, me = self.standing(self._me), self._me
        if standing is AccessState.IN:
            return
        if standing is AccessState.BANNED:
            reason = self.listed.banned[me] or "no reason given"
            remedy = f"ask the organiser, who can let it back in with `peerd ban --lift {me}`"
            raise ShutOutError(f"the organiser has banned this peer from the run: {reason}", remedy)
        what = "this peer's invitation has ended" if standing is AccessState.ENDED else "only invited peers take part in this run"
        remedy = f"send the organiser this peer's id, {me}, and join with the answer: `peerd join ADDRESS --invitation TEXT`"
        raise ShutOutError(what, remedy)

    def show(self, caller: PeerId, invitation: bytes) -> None:
        """T9 (access): note an invitation of a peer, if the organiser has signed it for that very peer."""
        if not self.by_invitation or len(invitation) != INVITATION_BYTES or self.standing(caller) in (AccessState.IN, AccessState.BANNED):
            return
        until_s = invited_until(invitation, caller, self._run, self._key)
        if until_s is None or not ends_later(until_s, self._invited.get(caller)):
            return
        self._invited.pop(caller, None)
        self._invited[caller] = until_s
        while len(self._invited) > MAX_INVITED:
            del self._invited[next(other for other in self._invited if other != self._me)]
        self._waiters.wake()

    def use(self, invitation: bytes) -> bool:
        """Use an invitation as this peer's own, unless it has one that lasts longer. Returns whether the organiser has signed it for it."""
        until_s = invited_until(invitation, self._me, self._run, self._key) if self._key else None
        if until_s is None:
            return False
        if ends_later(until_s, self.invited_until_s):
            self.invitation, self._invited[self._me] = invitation, until_s
        return True

    def take(self, raw: RawList) -> bool:
        """T9 (access): take a list if it supersedes the one that is known. An older one changes nothing."""
        if not self._key or raw == self.raw:
            return False
        listed = read_list(raw, self._run, self._key)
        version = version_of(listed, raw[0])
        if version <= self.version:
            return False
        added = {peer: reason for peer, reason in listed.banned.items() if peer not in self.listed.banned}
        LOG.warning("a new list of the organiser", number=listed.number, allowed=len(listed.allowed), banned=len(listed.banned))
        for peer, reason in added.items():
            LOG.warning("banned by the organiser", banned=peer, reason=reason)
        self.listed, self.raw, self.version = listed, raw, version
        self._keep()
        self._waiters.wake()
        return True

    def newer_than(self, version: bytes) -> RawList | None:
        return self.raw if self.version > version else None

    async def changed(self, timeout_s: float) -> None:
        """Wait until there is another list or invitation, or for so long. What the disk did not take is written then."""
        await self._waiters.wait(timeout_s, float("inf"))
        if ACCESS_LIST in UNWRITTEN:
            self._keep()

    def _keep(self) -> None:
        if self._kept_at is not None:
            with UNWRITTEN.trying(ACCESS_LIST, self._kept_at):
                write_list(self._kept_at, self.raw)

    def _read(self, path: Path) -> None:
        try:
            found = list_on_disk(path, self._run, self._key)
        except (BadMessageError, DiskError) as error:
            LOG.warning("the organiser's list in this home cannot be used; the others tell it", error=str(error))
            return
        if found is not None:
            self.raw, self.listed = found
            self.version = version_of(self.listed, self.raw[0])
