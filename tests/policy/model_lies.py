"""What a lying peer of the protocol model tells of itself, and what it does not do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.policy.hashing import digest
from peerd.policy.step.certificates import SignedSlice
from peerd.policy.step.ledger import FEWEST, full
from peerd.policy.step.roster import Roster, entry_of, why_inexact
from peerd.table.forms import MAX_COUNT
from peerd.table.record import MAX_SIDELINED, NO_AVERAGE, AverageId, Lineage, PeerId, PeerRecord, Phase, Suspicion, Void
from tests.policy.model_exchange import Plan
from tests.policy.model_faults import LIES_OF_WORK, Kind
from tests.policy.model_theta import Average
from tests.policy.model_trust import SIGNED, Claim, falsified, root_of

if TYPE_CHECKING:
    from peerd.policy.step.situation import StepRules
    from peerd.table.view import LiveView
    from tests.policy.model_kept import Held
    from tests.policy.model_peer import ModelPeer
    from tests.policy.model_sections import Section
    from tests.policy.model_states import Snapshot
    from tests.policy.model_tied import Copy, Share

BOASTED_STEPS = 10
MAKE_UP = (Kind.FABRICATE, Kind.SIT, Kind.HOARD)
NUM_GHOSTS = 40
FLAPS_S, BLINKS_S = (7.4, 7.0), (2.4, 1.0)
"""How often and for how long."""


class Lies:
    """Its record, as others hear it. What the peer does stays honest, but a silent one joins no round, one that frames mates leaves one
    out of the round that it leads, and one that withholds launches nothing. It gives the state that it has.
    """

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._until_s: dict[Kind, float] = {}

    def tell(self, kind: Kind, lasts_s: float) -> None:
        self._until_s[kind] = self._peer.now + lasts_s
        self._peer.change()

    def told(self, listener: PeerId) -> PeerRecord:
        """The record as this peer tells it to another one."""
        peer, record = self._peer, self._peer.record
        if not self.has_lied:
            return record
        if self._tells(Kind.BOAST):
            record = replace(record, step=record.step + BOASTED_STEPS)
        if self._tells(Kind.ACCUSE):
            others = [name for name in peer.view.sightings if name != peer.name]
            record = replace(record, suspects=tuple(Suspicion(name, MAX_COUNT, MAX_COUNT) for name in others))
        if self._tells(Kind.CONTRADICT):
            everything = (1 << peer.world.scenario.num_microbatches) - 1
            record = replace(record, done=everything if listener < peer.name else 0, asides=())
        if self._tells(Kind.ABSORBED) and record.phase is Phase.ACCUMULATING:
            record = replace(record, phase=Phase.AVERAGING)
        each_s, for_s = FLAPS_S if self._tells(Kind.FLAP) else BLINKS_S if self._tells(Kind.BLINK) else (1.0, 0.0)
        if record.phase is Phase.ACCUMULATING and peer.world.now % each_s < for_s:
            record = replace(record, phase=Phase.AVERAGING)
        if self._tells(Kind.LAG) and record.phase is Phase.AVERAGED:
            record = replace(record, phase=Phase.ACCUMULATING, average_id=NO_AVERAGE, gradient_norm=None, tied_sum=NO_AVERAGE)
        if self._tells(Kind.MISNAME) and record.phase is Phase.AVERAGED:
            record = replace(record, average_id=AverageId(digest("misnamed", record.average_id)))
        if self._tells(Kind.STRAY) and record.phase is not Phase.JOINING:
            record = replace(record, lineage=Lineage(0, digest("astray", record.step)))
        if self._tells(Kind.MISNORM):
            norm = record.gradient_norm
            norms = tuple(replace(each, norm=each.norm / 2) for each in record.norms)
            record = replace(record, gradient_norm=None if norm is None else norm / 2, norms=norms)
        if self._tells(Kind.MISTIE) and self._peer.tied.exists:
            sums = tuple(replace(each, id=AverageId(digest("mistied", each.id))) for each in record.tied_sums)
            held = AverageId(digest("mistied", record.tied_sum)) if record.tied_sum else record.tied_sum
            record = replace(record, tied_sums=sums, tied_sum=held, tied=Lineage(0, b""))
        if self.pretends and record.phase is Phase.JOINING:
            record = replace(record, checkpoints=(max((r.step for r in peer.live().records), default=0),))
        if self._tells(Kind.FORGE) and record.phase is Phase.AVERAGED and peer.claim is not None:
            record = replace(record, average_id=self._forged(peer.claim).id)
        if self._tells(Kind.FABRICATE) and record.done and peer.world.rules.num_sections > 1:
            record = replace(record, sections=full(peer.world.rules.num_sections))
        if self._tells(Kind.FRAME):
            others = [name for name in peer.view.sightings if name != peer.name]
            record = replace(record, sidelined=tuple(others[:MAX_SIDELINED]))
        if self._tells(Kind.VOID):
            mates = [m for m in peer.live().serving(record.stage) if m.peer != peer.name]
            record = replace(record, voids=tuple(Void(m.peer, m.incarnation, record.step) for m in mates))
        if self._tells(Kind.CONSPIRE):
            honest = [p.name for p in peer.world.peers.values() if p.record.stage == record.stage and not p.lies.has_lied]
            record = replace(record, sidelined=tuple(sorted(honest)[:MAX_SIDELINED]))
        return record

    @property
    def pretends(self) -> bool:
        return self._tells(Kind.PRETEND)

    @property
    def sends_nothing(self) -> bool:
        return self._tells(Kind.STINGY)

    @property
    def trickles(self) -> bool:
        return self._tells(Kind.TRICKLE)

    @property
    def tears(self) -> bool:
        return self._tells(Kind.TEAR)

    @property
    def misjudges(self) -> bool:
        return self._tells(Kind.MISJUDGE)

    @property
    def injects(self) -> bool:
        return self._tells(Kind.INJECT)

    @property
    def inflates(self) -> bool:
        return self._tells(Kind.INFLATE)

    @property
    def falsifies(self) -> bool:
        return self._tells(Kind.FALSIFY) or self.conceals

    @property
    def conceals(self) -> bool:
        return self._tells(Kind.CONCEAL)

    @property
    def denounces(self) -> bool:
        return self._tells(Kind.DENOUNCE)

    @property
    def equivocates(self) -> bool:
        return self._tells(Kind.EQUIVOCATE)

    @property
    def shields(self) -> bool:
        return self._tells(Kind.SHIELD)

    @property
    def rules(self) -> StepRules:
        """A peer that makes averages up goes on with them though nobody else does."""
        return replace(self._peer.world.rules, certifies=False) if self._tells(Kind.FABRICATE) else self._peer.world.rules

    @property
    def has_lied(self) -> bool:
        return bool(self._until_s)

    @property
    def are_of_numbers(self) -> bool:
        """Whether it has lied so that what it holds itself may be wrong, or that others shut it out for good."""
        return bool(self._until_s) and not self._until_s.keys().isdisjoint({Kind.FORK, *MAKE_UP, *LIES_OF_WORK})

    @property
    def hoards(self) -> bool:
        """Whether it answers nobody that asks for its average."""
        return self._tells(Kind.HOARD)

    def sum_for(self, member: int, roster: Roster, total: Average) -> Average:
        """The sum of this peer's slice as it sends it to one member."""
        return falsified(total, roster.step, member) if self._tells(Kind.FORK) else total

    def make_up(self, live: LiveView) -> None:
        """Hold an average of all members' present ledgers, with numbers of its own, once nothing is missing."""
        peer = self._peer
        mine = peer.record
        if not any(map(self._tells, MAKE_UP)) or mine.phase is not Phase.ACCUMULATING:
            return
        members = [mine, *(m for m in live.members(mine.stage, mine.step) if m.peer != mine.peer)]
        entries = tuple(sorted(entry_of(m) for m in members))
        if why_inexact(entries, peer.world.scenario.num_microbatches):
            return
        if self.hoards:
            entries = (replace(entry_of(mine), done=full(peer.world.scenario.num_microbatches)),)
        roster, num = Roster(mine.stage, mine.step, 1_000_000 + peer.rounds.attempt, mine.peer, entries), len(entries)
        peer.world.plans[roster.average_id] = Plan(tuple(100 * (e.peer == mine.peer) for e in entries), (1.0,) * num, 2, 1.0)
        numbers = falsified(tuple(peer.accumulator), mine.step, 0)
        peer.trust.signs(roster.average_id, numbers)
        claim = Claim(roster, (SignedSlice(mine.peer, root_of(numbers), SIGNED),) if peer.world.rules.certifies else ())
        peer.world.counts["made up"] += 1
        peer.adopt(claim.id, numbers, claim)

    def confirmed(self, average_id: AverageId) -> AverageId:
        """What came of a round, as this peer tells it to the others."""
        return AverageId(digest("misnamed", average_id)) if self._tells(Kind.MISNAME) else average_id

    @property
    def is_reticent(self) -> bool:
        """Whether it says nothing of what came of its rounds."""
        return self._tells(Kind.RETICENT)

    def section(self, step: int, number: int, found: Section | None) -> Section | None:
        """A section of the average as it gives it to a mate: one of its own making, under the members' names and its own signature."""
        peer = self._peer
        members = [] if not self._tells(Kind.FABRICATE) else peer.live().members(peer.record.stage, step)
        if not members or peer.world.rules.num_sections == 1:
            return found
        entries = found[0].roster.entries if found is not None else tuple(sorted(entry_of(m) for m in members))
        roster = Roster(peer.record.stage, step, 0, peer.name, entries, section=number, num_sections=peer.world.rules.num_sections)
        numbers = falsified(tuple(peer.accumulator), step, number)
        peer.trust.signs(roster.average_id, numbers)
        claim = Claim(roster, (SignedSlice(peer.name, root_of(numbers), SIGNED),), tuple(entry.peer for entry in entries))
        peer.trust.confirms(claim)
        peer.world.counts["made up"] += 1
        return claim, numbers

    def shares(self, found: tuple[Share, ...] | str) -> tuple[Share, ...] | str:
        """Gradients of a tied weight as it gives them."""
        if isinstance(found, str) or not self._tells(Kind.MISTIE):
            return found
        return tuple((falsified(average, self._peer.record.step, 0), which) for average, which in found)

    def copy(self, found: Copy | None) -> Copy | None:
        """Its copy of a tied weight as it gives it."""
        if found is None or not self._tells(Kind.MISTIE):
            return found
        return replace(found, tied=Lineage(0, b""), symbol=self._peer.world.thetas.made_up(found.symbol))

    def state(self, found: Snapshot) -> Snapshot:
        """Its state as it gives it to a joiner, true where others could not tell: of two peers nobody can say which one lies."""
        others = [m for m in self._peer.live().serving(found.stage) if m.peer != self._peer.name]
        lies = len(others) >= FEWEST - 1 and self._tells(Kind.MISGIVE)
        if not lies:
            return found
        false = self._peer.world.thetas.made_up
        return replace(found, theta=false(found.theta), previous=None if found.previous is None else false(found.previous))

    def given(self, held: Held) -> Held:
        """An average as it gives it to a mate."""
        forged = self._forged(held.claim) if self._tells(Kind.FORGE) else held.claim
        return replace(held, claim=forged, average_id=forged.id)

    def _forged(self, claim: Claim) -> Claim:
        slices = [each if each.reducer == self._peer.name else replace(each, root=b"forged") for each in claim.slices]
        sections = tuple(map(self._forged, claim.sections))
        roster = replace(claim.roster, parts=tuple(each.id for each in sections))
        return replace(claim, roster=roster, slices=tuple(slices), sections=sections)

    def holds_back(self) -> bool:
        """Whether it does not commit, though it could: nobody of its stage has yet."""
        mine = self._peer.record
        return self._tells(Kind.LAG) and not any(mate.step > mine.step for mate in self._peer.live().serving(mine.stage))

    def ghosts(self) -> tuple[PeerRecord, ...]:
        """Records of peers that are not there. They rise each period, as if these peers announced themselves."""
        if not self._tells(Kind.GHOSTS):
            return ()
        mine, scenario = self._peer.record, self._peer.world.scenario
        risen = replace(mine, version=int(self._peer.world.now), phase=Phase.ACCUMULATING, done=0, asides=(), trains=True)
        names = [PeerId(f"g{number}") for number in range(NUM_GHOSTS)]
        return tuple(replace(risen, peer=name, stage=number % scenario.num_stages) for number, name in enumerate(names))

    def never_asked(self, roster: Roster) -> PeerId | None:
        """The member that gets no proposal of this peer's, so that all others wait for it in vain."""
        others = [name for name in roster.peers if name != self._peer.name]
        return others[0] if others and self._tells(Kind.FRAME) else None

    @property
    def is_silent(self) -> bool:
        return self._tells(Kind.SILENT) or self._tells(Kind.ABSORBED) or self._tells(Kind.STRAY)

    @property
    def proposes_nothing(self) -> bool:
        return self.is_silent or self._tells(Kind.BLINK) or self._tells(Kind.MUTE)

    @property
    def withholds(self) -> bool:
        return self._tells(Kind.WITHHOLD)

    @property
    def dribbles(self) -> bool:
        return self._tells(Kind.DRIBBLE)

    def _tells(self, kind: Kind) -> bool:
        return bool(self._until_s) and self._peer.now < self._until_s.get(kind, float("-inf"))
