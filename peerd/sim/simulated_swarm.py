"""The simulated swarm: the true stage and speed of every peer. What planners know of it is in `delayed_table`."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from peerd.sim.devices import Device
from peerd.table.record import PeerId


@dataclass(slots=True)
class SimulatedPeer:
    """One simulated machine. A download is void if `moves` has changed since it began."""

    id: PeerId
    device: Device
    stage: int = 0
    serving: bool = False
    place: int = 0
    """Index in the list of its stage."""
    moves: int = 0


class SimulatedSwarm:
    """The true state of the swarm. A stage's strength is the sum over its serving peers, in samples/s."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.stages: list[list[SimulatedPeer]] = [[] for _ in range(num_stages)]
        self.strengths = [0.0] * num_stages
        self.num_serving = [0] * num_stages
        self.speeds: list[float] = []
        """Speeds of all peers, ascending."""

    @property
    def throughput(self) -> float:
        return min(self.strengths)

    def enter(self, peer: SimulatedPeer) -> None:
        self.peers[peer.id] = peer
        bisect.insort(self.speeds, peer.device.speed)
        self._attach(peer)

    def leave(self, peer: SimulatedPeer) -> None:
        del self.peers[peer.id]
        del self.speeds[bisect.bisect_left(self.speeds, peer.device.speed)]
        self._detach(peer)

    def move(self, peer: SimulatedPeer, stage: int, *, serving: bool) -> None:
        self._detach(peer)
        peer.stage, peer.serving, peer.moves = stage, serving, peer.moves + 1
        self._attach(peer)

    def serve(self, peer: SimulatedPeer) -> None:
        """The peer's download is done."""
        peer.serving = True
        self._count(peer, 1)

    def _attach(self, peer: SimulatedPeer) -> None:
        members = self.stages[peer.stage]
        peer.place = len(members)
        members.append(peer)
        if peer.serving:
            self._count(peer, 1)

    def _detach(self, peer: SimulatedPeer) -> None:
        members = self.stages[peer.stage]
        last = members.pop()
        if last is not peer:
            members[peer.place] = last
            last.place = peer.place
        if peer.serving:
            self._count(peer, -1)

    def _count(self, peer: SimulatedPeer, sign: int) -> None:
        self.num_serving[peer.stage] += sign
        self.strengths[peer.stage] += sign * peer.device.speed
        if self.num_serving[peer.stage] == 0:
            self.strengths[peer.stage] = 0.0  # removes the rounding error
