"""The sections of a step's average that a peer of the protocol model holds, and how it gets others from mates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerd.policy.step.acts import FetchSection
from peerd.policy.step.groups import forms_groups
from peerd.policy.step.ledger import full
from peerd.policy.step.roster import Roster, why_refuse
from peerd.table.record import PeerId, Phase
from tests.policy.model_theta import Average
from tests.policy.model_trust import Claim

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer

Section = tuple[Claim, Average]
"""What is said of the round that made it, and what it sums."""


class Sections:
    """What the record says is there: `held` may have more, of before the ledger was dropped."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._held: dict[int, Section] = {}
        self.fetching: set[tuple[PeerId, int]] = set()

    def take(self, number: int, section: Section) -> None:
        peer = self._peer
        if not peer.world.rules.certifies:
            peer.world.check_average(peer, section[1])
        self._held[number] = section
        peer.change(sections=peer.record.sections | 1 << number)
        self.complete()

    def why_refuse(self, roster: Roster) -> str | None:
        rules, members = self._peer.world.rules, self._peer.live().members(roster.stage, roster.step)
        return why_refuse(self._peer.record, roster, rules.num_microbatches, forms_groups(members, rules.group_size), rules.num_sections)

    def made(self, claim: Claim, total: Average) -> None:
        """A round for a section is done."""
        self._peer.world.counts["sections"] += 1
        self._peer.change(tell=False, phase=Phase.ACCUMULATING)
        self.take(claim.roster.section, (claim, total))

    def complete(self) -> None:
        """All sections together are the average. In a round for a section this peer stays until that is over."""
        peer, num_sections = self._peer, self._peer.world.rules.num_sections
        if num_sections == 1 or peer.record.sections != full(num_sections) or peer.record.phase is not Phase.ACCUMULATING:
            return
        found = [self._held[number] for number in range(num_sections)]
        sections = tuple(claim for claim, _ in found)
        peer.world.counts["averages by sections"] += 1
        roster = Roster(peer.record.stage, peer.record.step, 0, peer.name, (), parts=tuple(claim.id for claim in sections))
        peer.adopt(roster.average_id, found[0][1], Claim(roster, sections=sections))

    def of(self, step: int, number: int) -> Section | None:
        record = self._peer.record
        found = self._held.get(number) if record.step == step and record.sections >> number & 1 else None
        return self._peer.lies.section(step, number, found)

    def fetch(self, act: FetchSection) -> None:
        peer, number = self._peer, act.section
        asked = (peer.record.incarnation, peer.record.step, peer.record.lineage)
        self.fetching.add((act.peer, number))

        def answered(found: object) -> None:
            self.fetching.discard((act.peer, number))
            now = peer.record
            if found is None:
                peer.unanswered[act.peer, act.step] = peer.now
            elif not isinstance(found, tuple) or not peer.trust.takes_section(act.peer, *found):
                peer.refused[act.peer, act.step] = peer.now
            elif asked == (now.incarnation, now.step, now.lineage) and now.phase in (Phase.ACCUMULATING, Phase.AVERAGING):
                peer.world.counts["sections fetched"] += 1
                self.take(number, found)
            peer.poke()

        peer.rounds.ask(act.peer, lambda mate: mate.rounds.sections.of(act.step, number) or "refused", answered)
