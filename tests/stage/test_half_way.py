"""An error in the middle of a change: the gradient is in the sum with its bit, or neither is; a ledger that is spoilt is dropped whole."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from peerd.policy.step.asides import UNKNOWN, sums
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.accumulator import Accumulator
from peerd.stage.results import Ticket
from peerd.stage.state import StageState
from peerd.table.record import Phase
from tests.stage.test_state import ALL, CPU, ME, Stage
from tests.tiny_run import tiny_manifest

resource = pytest.importorskip("resource")
DROPPED = "ledger dropped: an addition to it failed half way"


class Broken(Tensor):
    """A tensor on a device that fails as soon as its values are needed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {Tensor.add_, Tensor.copy_, Tensor.__iadd__}:
            raise RuntimeError("the device has failed")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def gradients_of(state: StageState, last_fails: bool = False) -> list[Tensor]:
    found = [torch.ones(parameter.shape) for parameter in state.holdings.module.parameters()]
    return [*found[:-1], found[-1].as_subclass(Broken)] if last_fails else found


def ticket(state: StageState, index: int, ahead: int = 0, again: bool = False) -> Ticket:
    record = state.record
    number = record.next_ledger_no if ahead else record.ledger_no
    return Ticket(record.step + ahead, index, (record.incarnation, number), True, again=again)


def fails(work: Callable[[], Any]) -> None:
    """`work` raises the device's error, and the log says that a ledger was dropped."""
    with capture_logs() as logs, pytest.raises(RuntimeError, match="the device has failed"):
        work()
    assert [line["event"] for line in logs] == [DROPPED]


def test_an_addition_that_fails_half_way_drops_the_ledger_and_what_comes_later_counts() -> None:
    stage, plain = Stage(), Stage()
    state = stage.state
    assert state.accumulate(ticket(state, 0), gradients_of(state), 1.0) == ""
    late, number = ticket(state, 2), state.record.ledger_no
    fails(lambda: state.accumulate(ticket(state, 1), gradients_of(state, last_fails=True), 1.0))
    assert (state.record.done, state.record.ledger_no) == (0, number + 1)
    assert state.accumulate(late, gradients_of(state), 1.0) == "ledger was dropped since"
    for each in (stage, plain):
        assert each.add(1) == ""
    assert torch.equal(state.accumulator.flat, plain.state.accumulator.flat)


def test_an_aside_that_is_spoilt_takes_its_ledger_with_it() -> None:
    state = Stage().state
    assert state.accumulate(ticket(state, 0), gradients_of(state), 1.0) == ""
    assert state.accumulate(ticket(state, 1, again=True), gradients_of(state), 1.0) == ""
    assert sums(state.record) == {ME: 0b01, UNKNOWN: 0b10}
    fails(lambda: state.accumulate(ticket(state, 2, again=True), gradients_of(state, last_fails=True), 1.0))
    assert (state.record.done, state.record.asides) == (0, ())


def test_asides_that_cannot_become_one_sum_are_dropped_before_the_round() -> None:
    state = Stage().state
    for index in range(state._manifest.train.microbatches_per_step):
        assert state.accumulate(ticket(state, index, again=index == 0), gradients_of(state), 1.0) == ""
    aside = state._sums[0].of(UNKNOWN)
    assert isinstance(aside, Accumulator)
    aside.flat = aside.flat.as_subclass(Broken)
    roster = Roster(1, 0, 0, ME, (RosterEntry(ME, 1, state.record.ledger_no, ALL),))
    fails(lambda: state.open_round(roster))
    assert (state.record.done, state.record.asides, state.record.phase) == (0, (), Phase.ACCUMULATING)


def test_a_second_ledger_that_is_spoilt_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.stage.test_state.MANIFEST", tiny_manifest(2, accumulate="float64", delayed_updates=True))
    state = Stage().state
    assert state.accumulate(ticket(state, 0), gradients_of(state), 1.0) == ""
    assert state.accumulate(ticket(state, 1, ahead=1), gradients_of(state), 1.0) == ""
    first, number = state.record.ledger_no, state.record.next_ledger_no
    fails(lambda: state.accumulate(ticket(state, 2, ahead=1), gradients_of(state, last_fails=True), 1.0))
    assert (state.record.done, state.record.ledger_no, state.record.next_done) == (0b1, first, 0)
    assert state.record.next_ledger_no > number


@pytest.mark.parametrize("wrong", [torch.ones(1), torch.ones(3, 4)])
def test_a_gradient_of_another_shape_changes_nothing(wrong: Tensor) -> None:
    accumulator = Accumulator({"a": torch.Size([2]), "b": torch.Size([4])}, torch.float32, CPU)
    with pytest.raises(ValueError, match="shapes"):
        accumulator.add([torch.ones(2), wrong], loss=1.0)
    assert not accumulator.flat.any()
    assert not accumulator.is_void


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space of a process")
def test_memory_that_runs_out_in_the_middle_changes_nothing() -> None:
    """float32 gradients are converted to the sum's float64, which takes memory for each parameter."""
    large = 16 << 20
    accumulator = Accumulator({"small": torch.Size([8]), "large": torch.Size([large])}, torch.float64, CPU)
    gradients = [torch.ones(8), torch.ones(large)]
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), before[1]))
    try:
        with pytest.raises(RuntimeError, match="memory"):
            accumulator.add(gradients, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not accumulator.flat.any()
    assert not accumulator.is_void
    accumulator.add(gradients, loss=1.0)
    assert accumulator.flat.sum() == large + 9
