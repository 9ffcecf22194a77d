"""Rule J4 (leave): when a peer may leave its stage without costing anybody work."""

from __future__ import annotations

from peerd.table.record import PeerRecord, Phase
from peerd.table.view import LiveView


def has_successors(mine: PeerRecord, live: LiveView) -> bool:
    """Whether somebody else serves my stage, stays, and is near enough to go on with what I have."""
    return any(r.peer != mine.peer and not r.leaving and r.step >= mine.step - 1 for r in live.serving(mine.stage))


def owes_nothing(mine: PeerRecord, live: LiveView) -> bool:
    """My ledgers are empty and my mates have the average that emptied it; or nobody is there to average it with.

    A mate one step behind has yet to get my slice of the last average: gone with me, all of that step would have to be done again.
    """
    if not has_successors(mine, live):
        return True
    idle = mine.phase is Phase.JOINING or (mine.phase is Phase.ACCUMULATING and not mine.done | mine.next_done)
    waited_for = any(r.step == mine.step - 1 and not r.leaving for r in live.serving(mine.stage) if r.peer != mine.peer)
    return idle and not waited_for
