"""Signs that something else came of each round of a group, or for a section, than did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peerd.averaging.slices import Signatures
from peerd.daemon.peer import Peer
from peerd.policy.hashing import digest
from peerd.policy.step.confirming import SignedOutcome
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    confirmed = Signatures.confirmed

    def false(self: Signatures, roster: Roster, average_id: AverageId) -> SignedOutcome:
        return confirmed(self, roster, AverageId(digest("misnamed", average_id)))

    setattr(Signatures, "confirmed", false)  # noqa: B010 - it is a lie
