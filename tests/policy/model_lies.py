"""What a lying peer of the protocol model tells of itself, and what it does not do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.table.forms import MAX_COUNT
from peerd.table.record import MAX_SIDELINED, NO_AVERAGE, PeerId, PeerRecord, Phase, Suspicion
from tests.policy.model_faults import Kind

if TYPE_CHECKING:
    from peerd.policy.step.roster import Roster
    from tests.policy.model_peer import ModelPeer

BOASTED_STEPS = 10
NUM_GHOSTS = 40


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
        if self._tells(Kind.LAG) and record.phase is Phase.AVERAGED:
            record = replace(record, phase=Phase.ACCUMULATING, average_id=NO_AVERAGE, gradient_norm=None, tied_sum=NO_AVERAGE)
        if self._tells(Kind.FRAME):
            others = [name for name in peer.view.sightings if name != peer.name]
            record = replace(record, sidelined=tuple(others[:MAX_SIDELINED]))
        return record

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
        return self._tells(Kind.SILENT) or self._tells(Kind.ABSORBED)

    @property
    def withholds(self) -> bool:
        return self._tells(Kind.WITHHOLD)

    def _tells(self, kind: Kind) -> bool:
        return self._peer.now < self._until_s.get(kind, float("-inf"))
