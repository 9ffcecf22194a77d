"""Cases of the step that this peer is about to finish: mates that have finished it may accuse before this peer can judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from peerd.policy.step.evidence import Evidence
from peerd.table.record import PeerId, RunId


class EarlyCases:
    """Each mate may be the accuser in as many cases as there are mates: so none can push out what another says (hole 77).

    An accuser has one open case, but its words on the cases of others may be shown as cases of its own.
    """

    def __init__(self) -> None:
        self._of: dict[PeerId, dict[bytes, Evidence]] = defaultdict(dict)
        """By accuser and item."""

    def add(self, evidence: Evidence, run: RunId, mates: Collection[PeerId]) -> None:
        """Keep a case whose signatures are right, if one of these mates accuses in it."""
        if evidence.accuser not in mates or evidence.case(run) is None:
            return
        of_it, item_id = self._of[evidence.accuser], evidence.item(run).id
        if item_id in of_it:
            of_it[item_id] = of_it[item_id].merged(evidence)
        elif len(of_it) < len(mates):
            of_it[item_id] = evidence

    def taken(self) -> list[Evidence]:
        """All of them, which are no longer kept here."""
        found = [each for of_it in self._of.values() for each in of_it.values()]
        self._of.clear()
        return found
