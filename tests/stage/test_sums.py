"""Asides in a stage's state: what another peer may hold, too, is summed apart, and is given up without the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peerd.errors import WrongStateError
from peerd.policy.step.asides import UNKNOWN, sums
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.accumulator import Accumulator
from peerd.stage.microbatches import forward_backward
from peerd.stage.spool import Spools
from peerd.stage.stored_sum import StoredSum
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


@pytest.mark.parametrize("is_stored", [False, True])
def test_what_another_peer_may_hold_too_is_given_up_without_the_rest(tmp_path: Path, is_stored: bool) -> None:
    """A suspected mate held 1 and 2, and 3 was launched again."""
    stage, plain = Doubtful(suspected=[suspect(0b0110)]), Doubtful()
    stage.state._sums[0]._spools = Spools(tmp_path if is_stored else None, least_bytes=0)
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


@pytest.mark.parametrize("is_stored", [False, True])
def test_one_aside_too_many_makes_the_first_a_part_of_the_main_sum(tmp_path: Path, is_stored: bool) -> None:
    suspects = [suspect(1 << index, f"p{index}") for index in range(MAX_ASIDES + 1)]
    stage, plain = Doubtful(suspected=suspects), Doubtful()
    stage.state._sums[0]._spools = Spools(tmp_path if is_stored else None, least_bytes=0)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_sum_in_a_file_is_the_same_to_the_bit(tmp_path: Path, dtype: torch.dtype, overflows: bool) -> None:
    """Of several pieces, with a gradient that lies otherwise in memory, and microbatches that overflow or have no loss."""
    shapes = {"large": torch.Size((1500, 1000)), "number": torch.Size(()), "turned": torch.Size((3, 2))}
    main, other, in_memory = (Accumulator(shapes, dtype, CPU, overflows) for _ in range(3))
    file = Spools(tmp_path, least_bytes=0).file(main.flat.nbytes)
    assert file is not None
    stored, generator = StoredSum(main, file), torch.Generator().manual_seed(1)
    for loss, factor in ((1.5, 1.0), (0.25, 1e30), (None, 1.0), (torch.inf if overflows else 2.0, 1.0)):
        gradients = [torch.randn(shape, generator=generator) * factor for shape in ((1500, 1000), (), (2, 3))]
        gradients[2] = gradients[2].T
        for each in (stored, in_memory):
            each.add(gradients, loss, factor > 1)
    main.flat.fill_(0.125)
    other.flat.fill_(0.125)
    stored.add_to(main)
    in_memory.add_to(other)
    assert torch.equal(main.flat, other.flat)
    assert not main.is_void
    assert not stored.is_void


def test_a_disk_that_fails_leaves_no_half_of_a_microbatch(tmp_path: Path) -> None:
    main = Accumulator({"weight": torch.Size((2, 3))}, torch.float32, CPU)
    file = Spools(tmp_path, least_bytes=0).file(8)  # too short
    assert file is not None
    stored = StoredSum(main, file)
    with pytest.raises(WrongStateError, match="this peer's disk fails: the file has been cut short"):
        stored.add([torch.ones(2, 3)], None)
    assert stored.is_void
    with pytest.raises(WrongStateError, match="this peer's disk fails"):
        stored.add_to(main)
    assert main.is_void
