"""Local steps of a peer of the protocol model: its own versions of the parameters, and the logs by which they can be computed again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.policy.step.asides import dropped, merged
from peerd.policy.step.batches import batch_for, open_dropped
from peerd.table.record import AverageId, PeerId, PeerRecord
from tests.policy.model_theta import UNSEALED, Average, Gradient, ThetaId, Thetas

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer
    from tests.policy.protocol_model import World


class Local:
    """What a peer has made of its step's parameters."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._begun: ThetaId | None = None
        self._version = UNSEALED
        self.log: set[ThetaId] = set()
        """The versions, of any peer, of which this one knows what made them."""

    @property
    def is_on(self) -> bool:
        return self._peer.world.rules.batch_at(self._peer.record.step) > 0

    @property
    def version(self) -> ThetaId:
        """What a forward pass computes with now."""
        if self._begun != self._peer.theta:
            self.begin()
        return self._version

    def begin(self) -> None:
        """The parameters of the step, without an update."""
        self._begun = self._version = self._peer.theta

    def batch(self) -> PeerId:
        """The open batch for the next gradient."""
        return batch_for(self._peer.record, self._peer.world.rules.local_batch)

    def seal(self, name: PeerId) -> None:
        peer = self._peer
        bits = sum(aside.done for aside in peer.record.asides if aside.other == name)
        batch = tuple(sorted(gradient for gradient in peer.accumulator if bits >> gradient.index & 1))
        version = peer.world.thetas.local(self.version, batch)
        self._version = version
        self.log.add(version)
        peer.accumulator = [replace(each, sealed=version) if bits >> each.index & 1 else each for each in peer.accumulator]
        peer.record = merged(peer.record, peer.record.step, name)
        peer.world.counts["sealed"] += 1

    def seal_all(self) -> None:
        """A round opens."""
        for aside in self._peer.record.asides:
            self.seal(aside.other)

    def fence(self) -> None:
        """T3 (fence): the open batches go and the rest stays; where steps are not local all goes."""
        if self.is_on:
            self._left_with(open_dropped(self._peer.record))
        else:
            self._peer.drop_ledgers()

    def drop(self, names: Collection[PeerId]) -> None:
        """Rule 6 (reset): drop these sums. Without the main one the parameters are those of the step again."""
        peer = self._peer
        self._left_with(dropped(peer.record, names))
        if self.is_on and peer.name in names:
            peer.world.counts["whole ledgers dropped"] += 1
            self.begin()

    def _left_with(self, record: PeerRecord) -> None:
        self._peer.record = record
        self._peer.accumulator = [gradient for gradient in self._peer.accumulator if record.done >> gradient.index & 1]

    # logs

    def learn(self, log: Iterable[ThetaId]) -> None:
        """A message brought what its sender knew."""
        if "logs travel" not in self._peer.world.scenario.off:
            self.log.update(log)

    def joins(self, average_id: AverageId) -> None:
        """The log goes along with the parts of a round, and with its sums."""
        self._peer.world.logs.setdefault(average_id, set()).update(self.log)

    def came_together(self, average_id: AverageId) -> None:
        self.learn(self._peer.world.logs[average_id])


def why_not_replayed(world: World, average: Average) -> str | None:
    """I8: None when those that live know all that it takes to compute the average again."""
    known = {version for peer in world.peers.values() if peer.alive for version in peer.local.log}
    if any(gradient.sealed == UNSEALED for gradient in average):
        return "a microbatch of the average is in no update"
    for version in versions_behind(world.thetas, average):
        if version not in known:
            return f"nobody alive knows what made version {version}"
    return None


def versions_behind(thetas: Thetas, average: Average) -> Iterator[ThetaId]:
    """The versions of peers' own parameters that an average depends on: those sealed in it, those computed with, and theirs."""
    seen, todo = set[ThetaId](), [*_of(average)]
    while todo:
        version = todo.pop()
        made = thetas.made_of(version)
        if made is not None and version not in seen:
            seen.add(version)
            yield version
            todo += [made[0], *_of(made[1])]


def _of(gradients: Iterable[Gradient]) -> Iterator[ThetaId]:
    for gradient in gradients:
        yield from (gradient.sealed, *gradient.thetas)
