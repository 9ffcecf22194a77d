"""What rounds need of the peer around them."""

from __future__ import annotations

from typing import Protocol

from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId, RawRecord


class RoundHost(Protocol):
    """The peer at which rounds run: what they tell it, and ask of it."""

    def own_record(self) -> RawRecord:
        """This peer's record, freshly published."""

    def learn(self, record: RawRecord) -> None:
        """A member that did not join has sent its record: the leader had an older one."""

    def report_failure(self, peer: PeerId) -> None:
        """A call to this peer failed."""

    def round_opened(self) -> None:
        """Its members know of it by its roster, and nobody else waits to hear of it."""

    def announce(self) -> None:
        """A round has ended."""

    def applied(self, roster: Roster) -> None:
        """An average was applied to the parameters, also while catching up."""
