"""Rule J4 (leave): when a peer may leave its stage without costing anybody work."""

from __future__ import annotations

from peerd.table.record import PeerRecord, Phase
from peerd.table.view import LiveView


def has_successors(mine: PeerRecord, live: LiveView) -> bool:
    """Whether another peer serves this stage, stays, and is at most one step behind, so that it can carry on."""
    return any(r.peer != mine.peer and not r.leaving and r.step >= mine.step - 1 for r in live.serving(mine.stage))


def owes_nothing(mine: PeerRecord, live: LiveView) -> bool:
    """Whether this peer's ledgers are empty and its mates have the last average; also true if there is no mate to average with.

    A mate that is one step behind still needs this peer's slice of the last average. Without it that whole step would be computed again.
    """
    if not has_successors(mine, live):
        return True
    idle = mine.phase is Phase.JOINING or (mine.phase is Phase.ACCUMULATING and not mine.done | mine.next_done)
    waited_for = any(r.step == mine.step - 1 and not r.leaving for r in live.serving(mine.stage) if r.peer != mine.peer)
    return idle and not waited_for
