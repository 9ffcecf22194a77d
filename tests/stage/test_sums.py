"""Asides in a stage's state: what another peer may hold, too, is summed apart, and is given up without the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from peerd.policy.step.asides import UNKNOWN, sums
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.accumulator import Accumulator
from peerd.stage.microbatches import forward_backward
from peerd.stage.sums import Sums
from peerd.table.record import MAX_ASIDES, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.stage.test_state import CPU, MATE, ME, Stage


@dataclass
class Doubtful(Stage):
    """A peer that sees suspected mates."""

    num_microbatches: int = MAX_ASIDES + 1
    suspected: list[PeerRecord] = field(default_factory=list)

    def live(self) -> LiveView:
        return replace(super().live(), suspected=tuple(self.suspected))

    def averaged(self) -> Tensor:
        """What a round takes: all sums together. A mate has the rest."""
        record, full = self.state.record, (1 << self.num_microbatches) - 1
        entries = [RosterEntry(ME, 1, record.ledger_no, record.done), RosterEntry(MATE, 0, 0, full & ~record.done)]
        reason, copy = self.state.open_round(Roster(record.stage, record.step, 0, ME, tuple(sorted(entries))))
        assert reason == ""
        assert copy is not None
        return copy


def suspect(done: int, name: str = MATE) -> PeerRecord:
    return PeerRecord(peer=PeerId(name), stage=1, phase=Phase.ACCUMULATING, done=done)


def test_what_another_peer_may_hold_too_is_given_up_without_the_rest() -> None:
    """A suspected mate held 1 and 2, and 3 was launched again."""
    stage, plain = Doubtful(suspected=[suspect(0b0110)]), Doubtful()
    assert [stage.add(0), stage.add(1), stage.add(3, again=True), stage.add(2)] == [""] * 4
    assert sums(stage.state.record) == {ME: 0b0001, UNKNOWN: 0b1000, MATE: 0b0110}
    stage.state.drop_sums([MATE])
    assert stage.state.record.done == 0b1001
    assert [plain.add(0), plain.add(3)] == [""] * 2
    assert torch.equal(stage.averaged(), plain.averaged())
    assert stage.state.record.asides == ()


def test_a_main_sum_is_dropped_without_its_asides_and_a_late_microbatch_is_still_added() -> None:
    stage, plain = Doubtful(), Doubtful()
    late = stage.batch(2)
    assert [stage.add(0), stage.add(1, again=True)] == [""] * 2
    stage.state.drop_sums([ME])
    assert stage.state.record.done == 0b10
    assert forward_backward(stage.state, late).refused == ""
    assert [plain.add(1), plain.add(2)] == [""] * 2
    assert torch.equal(stage.averaged(), plain.averaged())


def test_one_aside_too_many_makes_the_first_a_part_of_the_main_sum() -> None:
    suspects = [suspect(1 << index, f"p{index}") for index in range(MAX_ASIDES + 1)]
    stage, plain = Doubtful(suspected=suspects), Doubtful()
    for index in range(MAX_ASIDES + 1):
        assert [stage.add(index), plain.add(index)] == [""] * 2
    assert sums(stage.state.record)[ME] == 0b1
    assert [aside.other for aside in stage.state.record.asides] == [each.peer for each in suspects[1:]]
    assert torch.equal(stage.averaged(), plain.averaged())


def test_where_memory_is_short_there_is_no_aside() -> None:
    class Full(Accumulator):
        def another(self) -> Accumulator:
            raise RuntimeError("out of memory")

    cramped = Sums(Full({"weight": torch.Size((2, 3))}, torch.float32, CPU))
    assert not cramped.begin(MATE)
    cramped.merge(MATE)
    assert cramped.of(None) is cramped.main
