"""How others reach a peer, through all that may happen: dialled, behind a relay, without one, behind one again, and dialled after all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.daemon import reachability
from peerd.daemon.network import Network
from peerd.daemon.reachability import Reachability
from peerd.policy.swarm.checkup import Dialled
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, Reach
from tests.link.test_relay import Peer, World, world
from tests.strategies import member, view_of
from tests.wire.callee import RUN

OWN = "/ip4/192.168.0.2/tcp/7/p2p/me"


class Home:
    """One peer's machine; `answers` is what those say who are asked to dial back."""

    def __init__(self, its: World, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[bool | None] = [False]
        self.changes: list[tuple[Reach, tuple[str, ...]]] = []
        self.hidden: list[bool] = []
        self._changed = asyncio.Event()
        view = view_of(member(peer.id), member(its.relay_id, relays=True, addresses=(its.relay_address,)))
        network = SimpleNamespace(config=SimpleNamespace(host="0.0.0.0"), outside_port=7, addresses=(OWN,), links=None)  # noqa: S104
        network.circuits = peer.circuits
        self.part = Reachability(cast(Network, network), cast(Membership, SimpleNamespace(live=lambda: view)), RUN, self)

        async def ask(*_arguments: Any) -> list[Dialled]:
            return [Dialled(PeerId("a"), "", answer) for answer in self.answers]

        monkeypatch.setattr(reachability, "dial_backs", ask)
        monkeypatch.setattr(reachability, "REFUSED_S", 0.0)
        monkeypatch.setattr(reachability, "LOOK_PERIOD_S", 0.01)

    def announce(self) -> None:
        self.changes.append((self.part.reach, self.part.addresses))
        self._changed.set()

    async def hide(self, hidden: bool) -> None:
        self.hidden.append(hidden)

    async def until(self, reach: Reach) -> None:
        while self.part.reach is not reach:
            self._changed.clear()
            await self._changed.wait()


async def in_a_home(monkeypatch: pytest.MonkeyPatch, story: Callable[[World, Home], Awaitable[None]]) -> None:
    async with world() as its:
        home = Home(its, await its.peer(hidden=True), monkeypatch)
        part = asyncio.ensure_future(home.part.run())
        try:
            await story(its, home)
        finally:
            part.cancel()
            await asyncio.gather(part, return_exceptions=True)


async def test_who_cannot_be_dialled_takes_a_relay_again_and_again_and_gives_it_up_when_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(its: World, home: Home) -> None:
        await home.until(Reach.RELAYED)
        assert home.part.addresses[0].startswith(f"{its.relay_address}/p2p-circuit/p2p/")
        assert home.part.relays == (its.relay_id,)
        await its.relay.switch("this peer is leaving")
        await home.until(Reach.CLIENT)
        assert "this peer is leaving" in home.part.reason
        assert home.part.addresses == (OWN,)
        await its.relay.switch("")
        await home.until(Reach.RELAYED)
        home.answers = [True, True, False]
        home.part.look_again()
        await home.until(Reach.DIRECT)
        assert (home.part.reason, home.part.addresses) == ("2 of 3 peers reached port 7", (OWN,))
        while its.relay.reserved:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        assert home.hidden == [True, False]

    await in_a_home(monkeypatch, story)


async def test_while_nobody_can_say_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(_its: World, home: Home) -> None:
        home.answers = [None]
        await asyncio.sleep(0.05)
        assert (home.part.reach, home.changes) == (Reach.UNKNOWN, [])
        home.answers = [True]
        home.part.look_again()
        await home.until(Reach.DIRECT)
        assert home.changes == [(Reach.DIRECT, (OWN,))]
        assert home.hidden == []

    await in_a_home(monkeypatch, story)
