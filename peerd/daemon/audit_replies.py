"""What this daemon tells of its audits, as plain values: rule 20 (audit)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peerd.audit.cases import KnownCase
from peerd.audit.tallies import AuditNote
from peerd.control.audits import AuditInfo, AuditsInfo, CaseInfo
from peerd.control.protocol import SCHEMA
from peerd.control.server import Say, Verb
from peerd.daemon.peer import Peer


class AuditVerb:
    """The control verb `audit`: who was audited, by whom, and what came of it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def verbs(self) -> dict[str, Verb]:
        return {"audit": self.audit}

    async def audit(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        auditor = self._peer.seat.auditor
        return {
            "schema": SCHEMA,
            "audits": audits_info(self._peer),
            "last": [_audit(note) for note in auditor.tallies.last] if auditor is not None else [],
            "cases": [_case(known) for known in self._peer.cases.known.values()],
        }


def audits_info(peer: Peer) -> AuditsInfo | None:
    """The counts of audits; None in a run without them."""
    seat, cases = peer.seat, peer.cases
    if seat.auditor is None or seat.witness is None:
        return None
    tallies, kept = seat.auditor.tallies, seat.witness.kept
    mates = (record.peer for record in peer.membership.live().of_stage(seat.stage))
    return {
        "items": tallies.num_items,
        "drawn": tallies.num_drawn,
        "counts": {outcome.value: count for outcome, count in sorted(tallies.counts.items())},
        "kept": kept.num_kept,
        "offered": kept.num_offered,
        "kept_bytes": kept.num_bytes,
        "most_kept_bytes": kept.most_bytes,
        "standing": sorted(cases.standing.standing(mates)),
        "lost": sorted(cases.losers),
        "own_fault": cases.own_fault,
    }


def _audit(note: AuditNote) -> AuditInfo:
    item = note.item
    return {
        "peer": item.audited,
        "stage": item.stage,
        "step": item.step,
        "index": item.index,
        "outcome": note.outcome.value,
        "deviation": note.deviation,
        "reason": note.reason,
    }


def _case(known: KnownCase) -> CaseInfo:
    item, words = known.item, sorted(known.case.words.items())
    return {
        "peer": item.audited,
        "accuser": known.case.accuser,
        "stage": item.stage,
        "step": item.step,
        "index": item.index,
        "ruling": known.ruling.value,
        "judges": [{"peer": judge, "deviation": word.distance, "tolerance": word.bound, "differs": word.differs} for judge, word in words],
        "losers": sorted(known.losers),
    }
