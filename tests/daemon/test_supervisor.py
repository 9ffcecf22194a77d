"""The supervisor: one that was rebuilt because it answered late is given longer the next time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from peerd.daemon import supervisor
from peerd.daemon.peer import Peer
from peerd.daemon.supervisor import ANSWER_TIMEOUT_S, Supervisor
from peerd.errors import PeerdError
from peerd.table.record import PeerId
from peerd.table.swarm_view import SwarmView

QUESTIONS = 8
TAKEN = "the port is taken"


@dataclass
class Machine:
    """A peer, its network, its p2pd and its DHT in one: p2pd answers nobody, and every rebuilding succeeds. Nobody else was ever seen."""

    p2pd_restarts: int = 0
    is_resting: bool = False
    is_open_to_all: bool = False
    allowed_s: list[float] = field(default_factory=list)
    """How long each question was to wait for its answer."""
    asked_enough: asyncio.Event = field(default_factory=asyncio.Event)
    p2p: None = None
    view: SwarmView = field(default_factory=lambda: SwarmView(me=PeerId("me"), ttl_s=15.0))

    def __post_init__(self) -> None:
        self.membership = self.network = self.p2pd = self.directory = self.reachability = self.place = self.signed = self
        self.run = "run"

    def bootstrap(self) -> tuple[str, ...]:
        return ()

    async def revive(self, _bootstrap: tuple[str, ...]) -> None: ...

    async def rebuild(self, *_: object) -> None: ...

    def look_again(self) -> None: ...

    def announce(self) -> None: ...

    async def answers(self, timeout_s: float) -> bool:
        self.allowed_s.append(timeout_s)
        if len(self.allowed_s) == QUESTIONS:
            self.asked_enough.set()
        return False


async def never(_p2pd: Any) -> None:
    await asyncio.Event().wait()


async def test_a_p2pd_that_seems_to_hang_again_and_again_is_given_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CHECK_PERIOD_S", 0.0)
    monkeypatch.setattr(supervisor, "watch", never)
    monkeypatch.setattr(supervisor, "clock_s", lambda: 1000.0)
    machine = Machine()
    running = asyncio.ensure_future(Supervisor(cast(Peer, machine)).run())
    async with asyncio.timeout(20):
        await machine.asked_enough.wait()
    running.cancel()
    await asyncio.wait({running})
    assert [allowed_s / ANSWER_TIMEOUT_S for allowed_s in machine.allowed_s[:QUESTIONS]] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert machine.p2pd_restarts >= QUESTIONS / 2 - 1


@dataclass
class Stubborn(Machine):
    """Its p2pd has ended and starts again only at the tenth attempt."""

    attempts: int = 0
    p2pd_problem: str = ""
    problems: list[str] = field(default_factory=list)

    async def revive(self, _bootstrap: tuple[str, ...]) -> None:
        self.problems.append(self.p2pd_problem)
        self.attempts += 1
        if self.attempts < 10:
            raise PeerdError(TAKEN)

    def announce(self) -> None:
        self.asked_enough.set()


async def ended(_p2pd: Any) -> None: ...


async def test_p2pd_is_rebuilt_however_many_attempts_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(supervisor, "watch", ended)
    machine = Stubborn()
    running = asyncio.ensure_future(Supervisor(cast(Peer, machine)).run())
    async with asyncio.timeout(20):
        await machine.asked_enough.wait()
    running.cancel()
    await asyncio.wait({running})
    assert machine.problems[:10] == ["", *[TAKEN] * 9]
    assert machine.p2pd_problem == ""


@dataclass
class Laptop(Machine):
    """Its p2pd is well, and it has another address at the third look."""

    is_open_to_all: bool = True
    looks: int = 0
    did: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.links = self

    async def answers(self, timeout_s: float) -> bool:
        self.allowed_s.append(timeout_s)
        return True

    def is_lost(self, _hosts: object) -> bool:
        self.looks += 1
        return self.looks == 3

    def cut_all(self) -> None:
        self.did.append("cut")

    async def revive(self, _bootstrap: tuple[str, ...]) -> None:
        self.did.append("rebuilt")

    def announce(self) -> None:
        self.did.append("told")
        self.asked_enough.set()


async def test_a_machine_with_another_address_leaves_dead_connections_at_once_and_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CHECK_PERIOD_S", 0.0)
    monkeypatch.setattr(supervisor, "watch", never)
    machine = Laptop()
    monkeypatch.setattr(supervisor, "OwnAddress", lambda: machine)
    running = asyncio.ensure_future(Supervisor(cast(Peer, machine)).run())
    async with asyncio.timeout(20):
        await machine.asked_enough.wait()
        while len(machine.allowed_s) < 4:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert machine.did == ["cut", "rebuilt", "told"]
    assert set(machine.allowed_s) == {ANSWER_TIMEOUT_S}, "p2pd is not at fault"
