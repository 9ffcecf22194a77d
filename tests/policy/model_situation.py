"""What a peer of the protocol model knows of itself when it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerd.policy.step.situation import OwnState
from tests.policy.model_exchange import judge_silent_s

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer

FORGET_REFUSAL_S = 2.0


def own_state_of(peer: ModelPeer) -> OwnState:
    now = peer.now
    if peer.refused:
        peer.refused = {key: at for key, at in peer.refused.items() if now - at < FORGET_REFUSAL_S}
    if peer.unbelieved:
        peer.unbelieved = {key: at for key, at in peer.unbelieved.items() if now - at < FORGET_REFUSAL_S}
    if peer.unanswered:
        peer.unanswered = {key: at for key, at in peer.unanswered.items() if now - at < FORGET_REFUSAL_S}
    current = peer.rounds.current
    return OwnState(
        record=peer.record,
        round_roster=current.roster if current else None,
        round_still_s=peer.now - current.moved_at_s if current else 0.0,
        judge_silent_s=judge_silent_s(current, peer.now) if current and "give up" not in peer.world.scenario.off else 0.0,
        round_lost=peer.rounds.lost,
        joined=frozenset(peer.trust.joined),
        refuted=peer.claim.roster if peer.claim and peer.claim.roster.average_id in peer.trust.refuted else None,
        giving_to=peer.rounds.giving_to,
        propose_after_s=peer.rounds.propose_after_s,
        attempt=peer.rounds.attempt,
        fetching=frozenset(peer.rounds.sections.fetching),
        last_in_turn=peer.rounds.sidelining.last_in_turn(peer.record.step),
        refused=frozenset(peer.refused),
        unanswered=frozenset(peer.unanswered),
        unbelieved=frozenset(peer.unbelieved),
        reloads_in_vain=peer.now - peer.found_no_donor_s < FORGET_REFUSAL_S,
    )
