"""Calls about a stage: they reach the seat that serves one, and none is left hanging when it is left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.daemon.reception import NOT_JOINING, Reception
from peerd.daemon.seat import Seat
from peerd.errors import WrongStateError
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, Phase
from tests.strategies import member

CALLER = PeerId("caller")
UNUSED: Any = None


class Busy:
    """A seat's rounds that take until told."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()

    async def propose(self, _caller: PeerId, _roster: Roster) -> str:
        self.begun.set()
        await self.end.wait()
        return "joined"

    def abort(self, _caller: PeerId, _average_id: AverageId) -> None:
        self.end.set()


def seat_of(rounds: Busy) -> Seat:
    return cast(Seat, SimpleNamespace(rounds=rounds))


async def test_before_a_stage_is_served_and_after_it_calls_are_refused() -> None:
    reception, rounds = Reception(), Busy()
    with pytest.raises(WrongStateError, match="serves no stage now"):
        await reception.propose(CALLER, UNUSED)
    reception.open(seat_of(rounds))
    rounds.end.set()
    assert cast(object, await reception.propose(CALLER, UNUSED)) == "joined"
    reception.close()
    with pytest.raises(WrongStateError, match="serves no stage now"):
        await reception.propose(CALLER, UNUSED)
    reception.abort(CALLER, AverageId(b""), CALLER, "")
    reception.cancel(CALLER, b"")


async def test_a_call_that_is_under_way_when_the_stage_is_left_ends_and_its_caller_may_ask_another_peer() -> None:
    reception, rounds = Reception(), Busy()
    reception.open(seat_of(rounds))
    call = asyncio.ensure_future(reception.propose(CALLER, UNUSED))
    await rounds.begun.wait()
    reception.close()
    with pytest.raises(WrongStateError, match="has left the stage"):
        await call
    assert not call.cancelled()
    reception.open(seat_of(rounds))
    rounds.end.set()
    assert cast(object, await reception.propose(CALLER, UNUSED)) == "joined"


async def test_a_call_that_its_caller_gives_up_is_cancelled_as_any_other() -> None:
    reception, rounds = Reception(), Busy()
    reception.open(seat_of(rounds))
    call = asyncio.ensure_future(reception.propose(CALLER, UNUSED))
    await rounds.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_hole_74_all_that_ask_for_sketches_and_do_not_join_the_stage_have_one_name() -> None:
    """A key costs nothing, and a peer that serves the stage needs no sketch."""
    askers: list[PeerId] = []

    async def sketch(asker: PeerId, *_asked: object) -> None:
        askers.append(asker)

    known = {
        "joiner": member("joiner", stage=1, phase=Phase.JOINING),
        "mate": member("mate", stage=1),
        "elsewhere": member("elsewhere", stage=0, phase=Phase.JOINING),
    }
    peer = SimpleNamespace(membership=SimpleNamespace(find=known.get))
    reception = Reception()
    reception.open(cast(Seat, SimpleNamespace(peer=peer, snapshots=SimpleNamespace(sketch=sketch))))
    for caller in ("joiner", "mate", "elsewhere", "stranger"):
        await reception.sketch(PeerId(caller), 1, b"seed", False)
    assert askers == ["joiner", *[NOT_JOINING] * 3]
