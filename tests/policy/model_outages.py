"""Faults of the protocol model that take many peers away at once. What is on the disks must be enough to go on exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from peerd.policy.step.tied import other_end
from peerd.table.record import PeerId, Phase

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer
    from tests.policy.protocol_model import World

BACK_WITHIN_S = 2.0
RETRY_S = 0.1
ALONE_S = 30.0
"""Time for which no other fault takes anybody away, where the newest state of a stage is on one disk alone."""


class Outages:
    def __init__(self, world: World) -> None:
        self._world = world
        self._one_alone: tuple[PeerId, int, float] | None = None
        """A peer whose disk alone has the newest state of its stage, that state's step, and until when to wait for it."""

    def is_one_alone(self, now_s: float) -> bool:
        """Whether the newest state of a stage is on one disk alone. That ends once its peer serves with it, and a mate, too."""
        if self._one_alone is None:
            return False
        name, step, until_s = self._one_alone
        peer = self._world.peers[name]
        serving = [
            p
            for p in self._world.peers.values()
            if self._world.takes_part(p) and p.record.stage == peer.record.stage and p.record.step >= step
        ]
        if now_s > until_s or sum(p.record.phase is not Phase.JOINING and now_s >= p.awake_at for p in serving) >= 2:
            self._one_alone = None
        return self._one_alone is not None

    def pause_before_stale_mates(self, target: ModelPeer, lasts_s: float) -> None:
        """Left out where the peer is not the newest of its stage, has no mate, or is not there itself."""
        world, mine = self._world, target.record
        mates = [p for p in world.peers.values() if world.takes_part(p) and p is not target and p.record.stage == mine.stage]
        newest = max((p.record.step for p in mates), default=mine.step)
        serves = mine.phase is not Phase.JOINING and not mine.leaving and world.now >= target.awake_at
        trains = any(p.record.trains for p in world.peers.values() if world.takes_part(p) and p not in mates)
        if not (mates and serves and trains and mine.step >= newest):
            return
        world.counts["stale mates"] += 1
        self._one_alone = target.name, mine.step, world.now + lasts_s + ALONE_S
        for mate in mates:
            mate.awake_at = max(mate.awake_at, world.now + lasts_s)
        until_s = self._one_alone[2]
        world.at(lasts_s, None, lambda: self._pause(target, mates, until_s))

    def _pause(self, target: ModelPeer, mates: list[ModelPeer], until_s: float) -> None:
        """As a daemon does: not in the middle of a step's end. After `until_s` not at all: the end of the step may need the mates."""
        world, stage = self._world, target.record.stage
        if not world.takes_part(target) or target.record.phase is Phase.JOINING or world.now > until_s:
            return
        if target.record.phase is not Phase.ACCUMULATING or self.is_needed_for_a_sum(target):
            for mate in mates:
                mate.awake_at = max(mate.awake_at, world.now + RETRY_S)
            world.at(RETRY_S, None, lambda: self._pause(target, mates, until_s))
            return
        world.save(target)
        target.alive = False
        self._one_alone = target.name, target.record.step, world.now + ALONE_S
        for mate in mates:
            world.wake(mate.name)
        world.at(BACK_WITHIN_S * world.rng.random(), None, lambda: self.come_back(target.name, stage))

    def is_needed_for_a_sum(self, target: ModelPeer) -> bool:
        """Where stages are tied: whether nobody at the other end has finished the step before this peer's: gap 4.

        This peer may then be the only one that knows the sum of that step. Stages in between know no sums.
        """
        world = self._world
        other = other_end(target.record.stage, world.rules.num_stages) if world.rules.ties_stages else None
        if other is None:
            return False
        ends = [p.record for p in world.peers.values() if world.takes_part(p) and p.record.phase is not Phase.JOINING]
        return max((r.step for r in ends if r.stage == other), default=target.record.step) < target.record.step

    def wipe(self, stage: int, lasts_s: float) -> None:
        """Left out while the disks of this stage and what the other stages hold have no step in common."""
        world = self._world
        of_stage = sorted(peer.name for peer in world.peers.values() if world.takes_part(peer) and peer.record.stage == stage)
        present = [
            peer for peer in world.peers.values() if world.takes_part(peer) and not peer.record.leaving
        ]  # a disk goes with who leaves
        others = sorted(peer.name for peer in present if peer.record.stage != stage)
        back = world.rng.sample(of_stage, -(-2 * len(of_stage) // 3))
        if not self.can_resume(dict.fromkeys(back, stage) | {name: world.peers[name].record.stage for name in others}):
            return
        world.counts["stages wiped"] += 1
        for name in of_stage:
            world.peers[name].alive = False
        for name in back:
            world.at(lasts_s * world.rng.random(), None, lambda name=name: self.come_back(name, stage))  # type: ignore[misc]

    def black_out(self, lasts_s: float) -> None:
        """Left out while no step is on the disks of every stage: such a run would be lost, as it says itself."""
        world = self._world
        everybody = sorted(peer.name for peer in world.peers.values() if world.takes_part(peer))
        held = {name: world.checkpoints[name][-1].stage for name in everybody if world.checkpoints.get(name)}
        stages = {name: held.get(name, world.peers[name].record.stage) for name in everybody}
        back = world.rng.sample(everybody, -(-2 * len(everybody) // 3))
        if not self.can_resume({name: stages[name] for name in back}):
            back = world.rng.sample(everybody, len(everybody))
        if not self.can_resume(stages):
            return
        world.counts["blackouts"] += 1
        world.directory.clear()
        for name in everybody:
            world.peers[name].alive = False
        for name in back:
            world.at(lasts_s * world.rng.random(), None, lambda name=name: self.come_back(name, stages[name]))  # type: ignore[misc]

    def can_resume(self, stages: Mapping[PeerId, int]) -> bool:
        """Whether a step is on the disks of all stages, and somebody trains, if these peers serve these stages."""
        world = self._world
        held: list[set[int]] = [set() for _ in range(world.scenario.num_stages)]
        for name, stage in stages.items():
            held[stage] |= {found.step for found in world.checkpoints.get(name, []) if found.stage == stage}
        common = set.intersection(*held) - {0}  # without its founder nobody begins a run anew from the first weights
        return bool(common) and any(world.peers[name].record.trains for name in stages)

    def restart(self, peers: Sequence[ModelPeer]) -> None:
        """They die at once, and come back with what is on their disks, one each second."""
        for number, peer in enumerate(peers):
            peer.alive = False
            self._world.at(1.0 + number, None, partial(self.come_back, peer.name, peer.record.stage))

    def come_back(self, name: PeerId, stage: int) -> None:
        """Start a dead peer again with what is on its disk."""
        world = self._world
        if not world.peers[name].alive and name not in world.banned:
            trains = world.peers[name].record.trains
            peer = world.add(name, stage)
            peer.record = replace(peer.record, trains=trains)
            peer.hearing.receive(world.directory.records(world.now))
            peer.join(stage)
