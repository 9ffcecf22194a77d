"""A peer leaves when nobody waits for anything it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.leaving import has_successors, owes_nothing
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.strategies import records


def peer(name: str, step: int = 5, phase: Phase = Phase.ACCUMULATING, done: int = 0, leaving: bool = False) -> PeerRecord:
    return PeerRecord(peer=PeerId(name), step=step, phase=phase, done=done, leaving=leaving)


def view(mine: PeerRecord, *others: PeerRecord) -> LiveView:
    return LiveView(me=mine.peer, records=tuple(sorted((mine, *others), key=lambda record: record.peer)))


ME = peer("me", leaving=True)


@pytest.mark.parametrize(
    ("mine", "others", "expected"),
    [
        pytest.param(ME, [peer("a")], True, id="idle beside a mate at the same step"),
        pytest.param(replace(ME, done=0b1), [peer("a")], False, id="my ledger has to reach the average"),
        pytest.param(replace(ME, next_done=0b1, next_ledger_no=1), [peer("a")], False, id="so has that of the next step"),
        pytest.param(replace(ME, phase=Phase.AVERAGING), [peer("a")], False, id="a mate waits for my slice"),
        pytest.param(replace(ME, phase=Phase.AVERAGED), [peer("a")], False, id="the average is not applied yet"),
        pytest.param(ME, [peer("a", step=4)], False, id="a mate has not got the last average"),
        pytest.param(ME, [peer("a", step=4, leaving=True), peer("b")], True, id="who leaves too needs no average"),
        pytest.param(ME, [peer("a", step=2)], True, id="a mate far behind has to reload anyway"),
        pytest.param(replace(ME, done=0b1), [], True, id="nobody to average with"),
        pytest.param(replace(ME, done=0b1), [peer("a", leaving=True)], True, id="all others leave too"),
        pytest.param(replace(ME, done=0b1), [peer("a", phase=Phase.JOINING)], True, id="a joiner has nothing to average with"),
        pytest.param(replace(ME, done=0b1, phase=Phase.JOINING), [peer("a")], True, id="a joiner's ledger counts for nobody"),
    ],
)
def test_what_a_leaver_owes(mine: PeerRecord, others: list[PeerRecord], expected: bool) -> None:
    assert owes_nothing(mine, view(mine, *others)) is expected


@given(records(), st.lists(records(), max_size=6, unique_by=lambda record: record.peer))
def test_a_peer_goes_only_if_no_successor_lacks_what_it_alone_may_hold(mine: PeerRecord, others: list[PeerRecord]) -> None:
    live = view(mine, *(other for other in others if other.peer != mine.peer))
    mates = [r for r in live.serving(mine.stage) if r.peer != mine.peer and not r.leaving]
    if owes_nothing(mine, live) and has_successors(mine, live):
        assert mine.phase is Phase.JOINING or not mine.done
        assert all(mate.step != mine.step - 1 for mate in mates)


@given(records(), st.lists(records(), max_size=6, unique_by=lambda record: record.peer))
def test_a_stage_with_a_successor_is_not_left_empty(mine: PeerRecord, others: list[PeerRecord]) -> None:
    live = view(mine, *(other for other in others if other.peer != mine.peer))
    if has_successors(mine, live):
        assert any(r.peer != mine.peer and not r.leaving for r in live.serving(mine.stage))
