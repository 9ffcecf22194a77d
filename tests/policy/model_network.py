"""The network of the protocol model: messages that are late, lost or find nobody, and streams of bulk between two peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from peerd.table.record import PeerId

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer
    from tests.policy.protocol_model import World


class Network:
    def __init__(self, world: World) -> None:
        self._world = world
        self.lossy_until = -1.0
        self.cuts: dict[tuple[PeerId, PeerId], float] = {}
        """Until when nothing gets from the one to the other; in `deaf`: nothing but replies."""
        self.deaf: dict[tuple[PeerId, PeerId], float] = {}

    def send(
        self,
        source: ModelPeer,
        target: PeerId,
        act: Callable[[ModelPeer], None],
        unreachable: Callable[[], None] | None = None,
        reply: bool = False,
    ) -> None:
        """Deliver `act` to the peer, with recent records on its back; it may be late, lost, or find nobody."""
        if self._lost(source.name, target) or (not reply and self.deaf.get((source.name, target), -1.0) > self._world.now):
            return
        records = source.hearing.recent_records(target)

        def arrive() -> None:
            peer = self._world.peers.get(target)
            if peer is None or not peer.alive:
                if unreachable is not None and self._world.rng.random() < 0.8:
                    self._world.at(self._delay(), source, unreachable)
            elif self._world.now < peer.awake_at:
                self._world.at(peer.awake_at - self._world.now + self._world.rng.uniform(0, 0.2), peer, lambda: deliver(peer))
            else:
                deliver(peer)

        def deliver(peer: ModelPeer) -> None:
            if source.name in peer.hearing.banned:
                return
            peer.hearing.receive(records, source.name)
            act(peer)

        self._world.at(self._delay(), None, arrive)

    def stream(self, source: ModelPeer, target: PeerId, act: Callable[[ModelPeer], None], broke: Callable[[], None] | None = None) -> None:
        """What goes over the stream of a pair, which either end may have opened: without news, and late where bytes were lost.

        `broke` is called where the stream breaks under it.
        """
        peer = self._world.peers.get(target)
        if peer is source:
            self._world.at(0.001, source, lambda: act(source))
            return
        if peer is None or not peer.alive or not self.pair_passes(source.name, target):
            if broke is not None:
                self._world.at(0.0, source, broke)
            return
        resent_s = 0.3 if self._world.now < self.lossy_until and self._world.rng.random() < 0.2 else 0.0

        def arrive() -> None:
            if self.pair_passes(source.name, target) and source.name not in peer.hearing.banned:
                act(peer)
            elif broke is not None:
                self._world.at(0.0, source, broke)

        self._world.at(self._delay() + resent_s, peer, arrive)

    def pair_passes(self, one: PeerId, other: PeerId) -> bool:
        """Whether a stream between two can be open: nothing is cut, and one of them can call the other."""
        ways = ((one, other), (other, one))
        return (
            max(self.cuts.get(way, -1.0) for way in ways) <= self._world.now
            and min(self.deaf.get(way, -1.0) for way in ways) <= self._world.now
        )

    def _delay(self) -> float:
        return min(self._world.rng.lognormvariate(self._world.scenario.delay, 0.8), 1.0)

    def has_dead_link(self, caller: PeerId, callee: PeerId) -> bool:
        until = max(self.cuts.get(way, -1.0) for way in ((caller, callee), (callee, caller)))
        return max(until, self.deaf.get((caller, callee), -1.0)) > self._world.now

    def _lost(self, source: PeerId, target: PeerId) -> bool:
        if self.cuts.get((source, target), -1.0) > self._world.now:
            return True
        return self._world.now < self.lossy_until and self._world.rng.random() < 0.2
