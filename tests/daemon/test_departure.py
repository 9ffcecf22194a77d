"""What a daemon is asked for while it is on its way out of a stage."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.control import teller
from peerd.control.protocol import SCHEMA
from peerd.daemon import departure
from peerd.daemon.answers import Answers
from peerd.daemon.departure import Departure, Left, Moved, Paused
from peerd.daemon.peer import Peer
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.table.record import Phase, RunId
from tests.strategies import member


class Leaving(Departure):
    """A departure from a stage without anything in it; `farewell` is what happens while others are told."""

    def __init__(self) -> None:
        super().__init__(cast(Peer, SimpleNamespace(is_pausing=False, is_resting=False)))
        self.while_others_are_told: list[str] = []

    async def _leave_stage(self) -> bool:
        return True

    async def _keep_state(self) -> None: ...

    async def _say_farewell(self) -> None:
        for asked in self.while_others_are_told:
            getattr(self, asked)()

    def _has_successors(self) -> bool:
        return True


class Draining(Departure):
    """A departure whose drain takes as long as `drained` is not set, in a run of which `steps` tells how far it is."""

    def __init__(self, step_time_s: float = 0.0, microbatch_s: float = 0.0) -> None:
        super().__init__(cast(Peer, SimpleNamespace(is_pausing=False)))
        self.drained = asyncio.Event()
        self.steps = 0
        self.step_time_s, self.microbatch_s = step_time_s, microbatch_s

    async def _drain(self) -> None:
        await self.drained.wait()

    def _progress(self) -> object:
        return self.steps

    def _step_time_s(self) -> float:
        return self.step_time_s

    def _microbatch_s(self) -> float:
        return self.microbatch_s


async def test_a_drain_lasts_as_long_as_the_run_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "STANDSTILL_S", 0.2)
    monkeypatch.setattr(departure, "DRAIN_LOOK_S", 0.01)
    draining = Draining()
    leaving = asyncio.ensure_future(draining._leave_stage())
    for _ in range(12):
        draining.steps += 1
        await asyncio.wait({leaving}, timeout=0.05)
    assert not leaving.done()
    draining.drained.set()
    assert await leaving


async def test_a_drain_is_given_up_where_the_run_stands_still_for_longer_than_its_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "STANDSTILL_S", 0.05)
    monkeypatch.setattr(departure, "DRAIN_LOOK_S", 0.01)
    assert not await asyncio.wait_for(Draining()._leave_stage(), 10)
    slow = [asyncio.ensure_future(each._leave_stage()) for each in (Draining(step_time_s=60.0), Draining(microbatch_s=60.0))]
    done, _ = await asyncio.wait(slow, timeout=0.3)
    assert not done, "after a download the last step was a fetched one, and took no time"
    for each in slow:
        each.cancel()


def test_hole_27_a_peer_that_slept_does_not_leave_as_if_it_had_no_mates() -> None:
    membership = Membership(Identity(Ed25519PrivateKey.from_private_bytes(bytes(32))), RunId("a" * 32), ttl_s=60.0)
    averaged = member(membership.me, step=4, phase=Phase.AVERAGED)
    leaving = Departure(cast(Peer, SimpleNamespace(membership=membership, seat=SimpleNamespace(state=SimpleNamespace(record=averaged)))))
    assert leaving._owes_nothing()
    membership.fence("this peer slept")
    assert not leaving._owes_nothing()


async def test_a_client_hears_that_a_drain_goes_on_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With long steps a drain takes longer than any client waits for a line."""
    monkeypatch.setattr(teller, "REPEAT_PERIOD_S", 0.01)
    told, departure = asyncio.Queue[str](), Leaving()
    seat = SimpleNamespace(service=SimpleNamespace(queue=2), state=SimpleNamespace(record=member("me", step=7)))
    parts = {
        "governor": None,
        "place": SimpleNamespace(signed=None),
        "membership": None,
        "network": SimpleNamespace(path_to=None),
        "gossip": SimpleNamespace(position=SimpleNamespace(round_trip_s=None)),
        "seat": seat,
    }
    answers = Answers(cast(Peer, SimpleNamespace(**parts)), departure, "")
    leaving = asyncio.ensure_future(answers.leave({}, told.put_nowait))
    assert {await told.get() for _ in range(3)} == {"finishing 2 microbatches of step 7"}
    seat.service.queue = 0
    async with asyncio.timeout(5):
        while await told.get() != "handing on its share of step 7":
            pass
    departure._gone.set()
    assert await leaving == {"schema": SCHEMA}


async def test_what_was_asked_is_done_once() -> None:
    leaving = Leaving()
    leaving.move(1)
    with pytest.raises(Moved):
        await leaving.of_stage()
    assert not leaving._peer.is_resting
    leaving.pause()
    assert leaving._peer.is_pausing
    with pytest.raises(Paused):
        await leaving.of_stage()
    assert (leaving._peer.is_pausing, leaving._peer.is_resting) == (False, True), "its record says so without a gap"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(leaving.of_stage(), 0.01)


@pytest.mark.parametrize("first", ["pause", "move"])
async def test_a_daemon_told_to_leave_while_it_pauses_or_moves_leaves_next(first: str) -> None:
    leaving = Leaving()
    leaving.while_others_are_told = ["ask_to_leave"]
    if first == "pause":
        leaving.pause()
    else:
        leaving.move(1)
    with pytest.raises((Paused, Moved)):
        await leaving.of_stage()
    leaving.while_others_are_told = []
    await asyncio.wait_for(leaving.of_resting(), 1)
    with pytest.raises(Left):
        await leaving.of_stage()
