"""The averages that a peer of the protocol model keeps for mates, and for joiners that have its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerd.policy.step.following import Followers, num_kept
from peerd.table.record import AverageId, Lineage, PeerId
from tests.policy.model_theta import Average
from tests.policy.model_tied import Sum
from tests.policy.model_trust import Claim

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer


@dataclass(frozen=True, slots=True)
class Held:
    """An average, and what it was applied with if its step is finished."""

    step: int
    average_id: AverageId
    average: Average
    claim: Claim
    lineage: Lineage
    """Of the parameters that it was computed with."""
    tied: Sum | None = None
    norm: float | None = None


class Kept:
    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._followers = Followers()
        self._held: list[Held] = []

    def add(self, held: Held) -> None:
        peer = self._peer
        self._held = [each for each in self._held if each.step != held.step] + [held]  # the run may have gone back
        needed = self._followers.needed_from(peer.live(), peer.record, peer.now)
        first = held.step + 1 - num_kept(peer.world.rules)
        if needed is not None and "following" not in peer.world.scenario.off:
            first = min(first, needed)
        self._held = [each for each in self._held if each.step >= first]

    def drop(self) -> None:
        """Lose them all, as where the owner leaves no room on the disk."""
        self._held.clear()

    def of_step(self, step: int) -> Held | None:
        return next((each for each in self._held if each.step == step), None)

    @property
    def number(self) -> int:
        """Of finished steps, from the last one back."""
        step, steps = self._peer.record.step, {each.step for each in self._held}
        return next(number for number in range(step + 1) if step - number - 1 not in steps)

    def give_state(self, joiner: PeerId, lasts_s: float) -> None:
        """A download of this peer's present state begins."""
        peer = self._peer
        self._followers.began(joiner, peer.record.step, peer.now)
        peer.after(lasts_s, lambda: self._followers.ended(joiner, peer.now, peer.world.rules.ttl_s))
