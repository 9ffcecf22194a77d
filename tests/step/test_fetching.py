"""What a peer gives up for a state that another one claims to have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peerd.errors import (
    BadMessageError,
    BusyError,
    HopelessError,
    PeerGoneError,
    RemoteError,
    StageError,
    UnbelievedError,
    WrongStateError,
)
from peerd.policy.step import acts
from peerd.policy.step.roster import Roster
from peerd.policy.step.situation import Situation
from peerd.policy.step.stepping import decide
from peerd.stage.executor import Executor
from peerd.step.fetching import Fetching
from peerd.step.stepper import Stepper
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase
from tests.step.test_commit import RULES, averaged
from tests.strategies import view_of

CLAIM = PeerRecord(peer=PeerId("liar"), phase=Phase.ACCUMULATING, step=9)
RELOAD = acts.Reload("the stage is at step 9", CLAIM.peer)


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    """It accumulates step 0; the only mate is one that claims step 9."""
    executor = Executor()
    made = averaged(executor)
    made._state.commit(None, None)
    yield made
    executor.close()


def gives(stepper: Stepper, monkeypatch: pytest.MonkeyPatch, find_donor: Callable[..., Any]) -> None:
    async def download(*_arguments: Any) -> Any:
        raise StageError("it cannot be downloaded")

    downloader = SimpleNamespace(find_donor=find_donor, download=download)
    monkeypatch.setattr(stepper, "_downloader", downloader)
    monkeypatch.setattr(stepper._fetching, "_downloader", downloader)


async def test_hole_30_a_reload_for_which_no_donor_shows_a_header_keeps_the_ledgers(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_donor(*_arguments: Any) -> PeerId:
        raise StageError("nobody gives a newer state")

    gives(stepper, monkeypatch, find_donor)
    before = stepper._state.record
    await stepper._do(RELOAD)
    assert stepper._state.record == before
    now = Situation(stepper.own_state(), view_of(before, CLAIM), 0.0, RULES)
    assert not isinstance(decide(now), acts.Reload)


def test_a_state_at_the_same_step_is_worth_the_ledgers_only_with_a_better_lineage() -> None:
    mine = PeerRecord(peer=PeerId("me"), phase=Phase.ACCUMULATING, step=9, lineage=Lineage(1, b"m" * 32))
    reload = acts.Reload("a stage mate has the better lineage", PeerId("mate"), 9)
    assert reload.is_met_by(9, Lineage(0, b"z" * 32), mine)
    assert reload.is_met_by(9, Lineage(1, b"a" * 32), mine)
    assert not reload.is_met_by(9, mine.lineage, mine)
    assert not reload.is_met_by(9, Lineage(2, b"a" * 32), mine)
    assert reload.is_met_by(10, Lineage(2, b"a" * 32), mine)
    assert not reload.is_met_by(8, Lineage(0, b"a" * 32), mine)


async def test_a_reload_whose_donor_shows_a_header_is_begun(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_donor(*_arguments: Any) -> PeerId:
        return CLAIM.peer

    gives(stepper, monkeypatch, find_donor)
    await stepper._do(RELOAD)
    assert stepper._state.record.phase is Phase.JOINING


async def test_a_peer_that_has_gone_on_while_the_header_came_decides_again(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_donor(*_arguments: Any) -> PeerId:
        stepper._state.fence(stepper._state.record.incarnation + 1)
        return CLAIM.peer

    gives(stepper, monkeypatch, find_donor)
    await stepper._do(RELOAD)
    assert stepper._state.record.phase is Phase.ACCUMULATING


@pytest.mark.parametrize("error", [UnbelievedError("too few hold it"), WrongStateError("it is gone")])
async def test_hole_53_an_average_that_is_not_believed_is_not_refused_and_is_asked_for_again_once_it_counts(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch, error: RemoteError
) -> None:
    mine, told = stepper._state.record, AverageId(b"told")
    mate = PeerRecord(peer=PeerId("mate"), phase=Phase.AVERAGED, step=mine.step, average_id=told)

    async def fetch(*_arguments: Any) -> Any:
        raise error

    fetching = stepper._fetching
    monkeypatch.setattr(fetching, "_rounds", SimpleNamespace(fetcher=SimpleNamespace(fetch=fetch)))
    monkeypatch.setattr(fetching._belief, "_rules", replace(RULES, certifies=True))
    refuted = SimpleNamespace(refuted={})
    monkeypatch.setattr(fetching._belief, "_membership", SimpleNamespace(live=lambda: view_of(mine, mate), contradictions=refuted))
    await fetching.average(acts.FetchAverage("a stage mate has the average", mate.peer, mine.step))
    assert fetching.unbelieved() == {(mate.peer, told)}
    assert fetching.refused() == (frozenset() if isinstance(error, UnbelievedError) else {(mate.peer, mine.step)})


async def fails_with(error: RemoteError, header: Roster | None) -> list[str]:
    """What the belief hears of a mate that is asked for the average which it tells, and fails after this header, if it shows one."""
    heard = list[str]()

    async def fetch(peer: PeerId, _step: int, _others: object, _failed: object, believe: Callable[[Roster, AverageId], None]) -> None:
        if header is not None:
            believe(header, header.average_id)
        raise error

    belief: Any = SimpleNamespace(
        by_header=lambda _mate: lambda _roster, _id: None,
        told_by=lambda _mate: AverageId(b"told"),
        caught=lambda *_: heard.append("caught"),
        disbelieves=lambda _mate: heard.append("disbelieved"),
        kept_back=lambda _mate: heard.append("kept back"),
    )
    state: Any = SimpleNamespace(record=PeerRecord(peer=PeerId("me"), phase=Phase.ACCUMULATING))
    rounds: Any = SimpleNamespace(fetcher=SimpleNamespace(fetch=fetch))
    nothing: Any = None
    await Fetching(state, nothing, rounds, nothing, nothing, nothing, belief).average(acts.FetchAverage("told", CLAIM.peer, 0))
    return heard


@pytest.mark.parametrize(
    ("error", "header", "heard"),
    [
        (PeerGoneError("no header"), None, ["kept back"]),
        (WrongStateError("it holds none"), None, ["kept back"]),
        (PeerGoneError("the line broke"), Roster(0, 0, 0, CLAIM.peer, ()), []),
        (BusyError("it gives to others"), None, []),
        (BadMessageError("a lie"), None, ["caught"]),
        (UnbelievedError("it may count later"), Roster(0, 0, 0, CLAIM.peer, ()), ["disbelieved"]),
        (HopelessError("it never counts"), Roster(0, 0, 0, CLAIM.peer, ()), ["disbelieved", "kept back"]),
    ],
)
async def test_hole_56_who_shows_no_header_or_a_hopeless_one_keeps_its_average_back(
    error: RemoteError, header: Roster | None, heard: list[str]
) -> None:
    assert await fails_with(error, header) == heard
