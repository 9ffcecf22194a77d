"""The interface by which rounds use the peer that runs them."""

from __future__ import annotations

from typing import Protocol

from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId, RawRecord


class RoundHost(Protocol):
    """The peer that runs the rounds."""

    def own_record(self) -> RawRecord:
        """Return this peer's record as it is; a new version only if something in it has changed."""

    def learn(self, record: RawRecord) -> None:
        """Take the record of a member that did not join, because the leader's copy of it was out of date."""

    def is_mate(self, peer: PeerId) -> bool:
        """Whether the table knows `peer` as one of this stage."""

    def report_failure(self, peer: PeerId) -> None:
        """Note that a call to `peer` failed."""

    def round_opened(self) -> None:
        """Note that a round has opened. There is no need to announce it: its members know it from the roster."""

    def announce(self) -> None:
        """Publish this peer's record, because a round has ended."""

    def averages_needed_from(self) -> int | None:
        """The first step whose average a joiner needs, or may need soon; None if nobody joins this stage."""

    def applied(self, roster: Roster) -> None:
        """Note that an average was applied to the parameters, in a step or while catching up."""
