"""A peer's copy of a weight that the first and the last stage both hold, as a symbol: its whole history. Part of the protocol model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from peerd.policy.hashing import digest
from peerd.policy.step.acts import FetchTied
from peerd.policy.step.norms import TOLD_STEPS
from peerd.policy.step.roster import lineage_skipped
from peerd.policy.step.tied import history_after, lineage_replaced, other_end
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerId, Phase, TiedSum
from tests.policy.model_theta import Average, ThetaId

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer

Question = Callable[[Callable[[object], None]], None]
"""Asks a peer for something, and hands the answer on."""
Share = tuple[Average, bytes]
"""A stage's share of the weight's gradients: all that was averaged and, where averages differ in rounding, which one it is."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Both stages' shares, the first stage's first."""

    id: AverageId
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    step: int
    tied: Lineage
    symbol: ThetaId


class Tied:
    """What a peer of either stage does with its copy; for any other it does nothing."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self.held: Sum | None = None
        """Of my average."""
        self.copy = peer.world.thetas.first(-1)

    @property
    def exists(self) -> bool:
        rules = self._peer.world.rules
        return rules.ties_stages and other_end(self._peer.record.stage, rules.num_stages) is not None

    @property
    def norm_waits(self) -> bool:
        """The weight counts in the first stage's norm, which is known with the sum."""
        return self.exists and self._peer.record.stage == 0 and self.held is None

    def share_of(self, average_id: AverageId, average: Average) -> Share:
        return average, average_id if self._peer.world.scenario.rounding else b""

    def tell(self) -> None:
        """What others need to know of my average, as far as I know it myself: the sum I hold, and the norm."""
        peer, held = self._peer, self.held.id if self.held else NO_AVERAGE
        assert peer.average is not None
        norm = None
        if peer.world.rules.shares_norms and not self.norm_waits:  # some number that is a function of what was averaged
            share = self.share_of(peer.record.average_id, peer.average)
            summed = self.held.shares if self.held and peer.record.stage == 0 else ()
            norm = float(int.from_bytes(digest(repr((share, summed)), peer.record.stage, size=2)))
        peer.change(gradient_norm=norm, tied_sum=held)

    def fetch(self, act: FetchTied) -> None:
        peer = self._peer
        mate, step, given, wanted = act.peer, act.step, act.given, act.wanted
        peer.fetching = True
        average_id = peer.record.average_id

        def given_by(mate: PeerId) -> Callable[[Callable[[object], None]], None]:
            return lambda answered: peer.rounds.ask(mate, lambda other: other.lies.shares(other.tied.shares_of(step, given)), answered)

        def answered(found: object) -> None:
            peer.fetching = False
            if found is None:
                peer.unanswered[mate, step] = peer.now
            elif not isinstance(found, tuple):
                peer.refused[mate, step] = peer.now
            elif peer.average is not None and (peer.record.step, peer.record.average_id) == (step, average_id):
                mine = self.share_of(average_id, peer.average)
                halves = (mine, *found) if peer.record.stage == 0 else (*found, mine)
                self.held = Sum(wanted, found if given == wanted else halves)
                peer.world.counts["tied sums"] += 1
                self.tell()

        least = 1 if "confirm tied" in peer.world.scenario.off else act.least
        self._confirmed(given_by(mate), [given_by(other) for other in act.others], least, answered)

    def _confirmed(self, first: Question, others: list[Question], least: int, answered: Callable[[object], None]) -> None:
        """Ask one peer, and then the others for the same: so many have to give what the first one gave."""
        told: list[object] = []

        def next_one(found: object) -> None:
            told.append(found)
            if not isinstance(told[0], tuple) or least == 1:
                answered(told[0])
            elif len(told) > len(others):
                answered(told[0] if told.count(told[0]) >= least else "refused")
            else:
                others[len(told) - 1](next_one)

        first(next_one)

    def shares_of(self, step: int, wanted: AverageId) -> tuple[Share, ...] | str:
        """Of my average or a sum, by its id."""
        peer = self._peer
        if peer.record.phase is Phase.AVERAGED and peer.record.step == step and peer.average is not None:
            if peer.record.average_id == wanted:
                return (self.share_of(wanted, peer.average),)
            if self.held is not None and self.held.id == wanted:
                return self.held.shares
        kept = peer.kept.of_step(step)
        return kept.tied.shares if kept is not None and kept.tied is not None and kept.tied.id == wanted else "refused"

    def apply(self, norm: float | None) -> None:
        """With my average, whose step ends by it."""
        peer = self._peer
        if not self.exists:
            return
        assert self.held is not None
        peer.world.check_shares(peer, self.held.shares)
        self.copy = peer.world.thetas.after(self.copy, (), repr(self.held.shares).encode(), norm)
        told = (*peer.record.tied_sums, TiedSum(peer.record.step, self.held.id))[-TOLD_STEPS:]
        told = () if "sums told" in peer.world.scenario.off else told
        self._note(told, history_after(peer.record.tied, self.held.id, norm))

    def skip(self) -> None:
        peer = self._peer
        if self.exists:
            self.copy = peer.world.thetas.skipped(self.copy)
            self._note(peer.record.tied_sums, lineage_skipped(peer.record.tied, peer.record.step))

    def _note(self, told: tuple[TiedSum, ...], tied: Lineage) -> None:
        """Others learn of it with the step that begins now."""
        self._peer.record = replace(self._peer.record, tied_sums=told, tied=tied)
        self.held = None

    # the other stage's copy

    def replace(self, mate: PeerId) -> None:
        peer = self._peer
        step = peer.record.step
        peer.fetching = True

        def answered(found: object) -> None:
            peer.fetching = False
            mine = peer.record
            if not isinstance(found, Copy) or found.step != mine.step or mine.phase is not Phase.ACCUMULATING or not found.tied < mine.tied:
                peer.refused[mate, step] = peer.now
                return
            peer.world.counts["copies replaced"] += 1
            self.copy = found.symbol
            peer.theta = peer.world.thetas.with_copy(peer.theta, self.copy)
            peer.drop_ledgers()
            peer.change(lineage=lineage_replaced(mine.lineage, found.tied), tied=found.tied, tied_sums=())
            peer.world.check_history(peer)

        peer.rounds.ask(mate, lambda other: other.lies.copy(other.tied.give()), answered)

    def give(self) -> Copy | None:
        return None if self._peer.record.phase is Phase.JOINING else self.now

    @property
    def now(self) -> Copy:
        return Copy(self._peer.record.step, self._peer.record.tied, self.copy)

    def take_over(self, copy: Copy) -> None:
        """With a whole state."""
        self.copy, self.held = copy.symbol, None
        self._peer.change(tied=copy.tied, tied_sums=(), tied_sum=NO_AVERAGE)
