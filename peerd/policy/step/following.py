"""Which averages a peer keeps for others: rules J1 (join) and J2 (download).

Every peer keeps the last ones for mates that missed steps, as long as they are fewer bytes than a state. One that gives its state to a
joiner also keeps all averages since that state, while the joiner downloads and catches up: however many steps that takes, the joiner
needs one download.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.policy.step.norms import TOLD_STEPS
from peerd.policy.step.situation import StepRules
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

LEAST_KEPT = 2
"""A mate that is one step behind has the stage finish another one while it fetches that."""
NEAR = 4
"""A joiner that is so few steps behind its stage does not fall behind, however that changes."""
NEARER_SHARE = 4
"""A joiner that comes no nearer to its stage within so many times its patience cannot catch up. At the slowest that it can, an average
takes 0.9 of a step, so it makes up for one in nine; if it is further behind than NEAR, its patience is longer than so many steps."""


def num_kept(rules: StepRules) -> int:
    """How many averages a peer keeps for mates that missed steps: where they would be more bytes, a mate downloads the state.

    One more, as the stage finishes a step meanwhile. Where stages share a weight, as many as records tell the sums of.
    """
    kept = max(LEAST_KEPT, rules.averages_in_state + 1)
    return max(kept, TOLD_STEPS) if rules.ties_stages else kept


@dataclass(slots=True)
class _Follower:
    step: int
    """It needs the average of this step next."""
    began_s: float
    moved_s: float
    """The time when its download ended, or when it was last seen to apply an average."""
    patience_s: float
    """How long it may take for the next move, once its downloads have ended."""
    downloads: int = 0
    """The number of downloads under way."""
    least_behind: int | None = None
    """The fewest steps that it has been behind since its downloads ended; None: it was not looked at since."""
    nearer_s: float = 0.0
    """When it came so near."""

    def is_lost(self, newest: int, now_s: float) -> bool:
        """Whether it comes no nearer to its stage, which is at the step `newest`."""
        behind = newest - self.step
        if self.least_behind is None or behind < self.least_behind:
            self.least_behind, self.nearer_s = behind, now_s
        return behind > max(self.least_behind, NEAR) and now_s - self.nearer_s > NEARER_SHARE * self.patience_s


class Followers:
    """The joiners that this peer has given its state. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._by_peer: dict[PeerId, _Follower] = {}

    def began(self, peer: PeerId, step: int, now_s: float) -> None:
        """The peer begins, or goes on, to download the state of this step."""
        known = self._by_peer.setdefault(peer, _Follower(step, now_s, now_s, 0.0))
        if known.downloads == 0:
            known.began_s = now_s
        known.least_behind = None
        known.step, known.downloads = min(known.step, step), known.downloads + 1  # it may go on with an earlier one that broke

    def ended(self, peer: PeerId, now_s: float, least_patience_s: float) -> None:
        """A download ended, whole or not. What it leads to may take as long as the download did: loading, and the first average."""
        known = self._by_peer.get(peer)
        if known is not None:
            known.downloads -= 1
            known.moved_s, known.patience_s = now_s, max(now_s - known.began_s, least_patience_s)

    def needed_from(self, live: LiveView, mine: PeerRecord, now_s: float) -> int | None:
        """The first step whose average a joiner needs from this peer, or may need soon; None if nobody joins its stage.

        A joiner is forgotten once it serves, when it makes no move for longer than it may take, or when it comes no nearer to its stage.
        One that has not asked for the state yet will get this step's or a later one.
        """
        for peer, follower in list(self._by_peer.items()):
            record = live.find(peer)
            if follower.downloads > 0:
                continue
            if record is not None and record.phase is Phase.JOINING and follower.step < record.step <= mine.step:
                follower.step, follower.moved_s = record.step, now_s
            serves = record is not None and record.phase is not Phase.JOINING
            if serves or now_s - follower.moved_s > follower.patience_s or follower.is_lost(mine.step, now_s):
                del self._by_peer[peer]
        joins = any(mate.phase is Phase.JOINING and mate.peer != mine.peer for mate in live.of_stage(mine.stage))
        return min((follower.step for follower in self._by_peer.values()), default=mine.step if joins else None)
