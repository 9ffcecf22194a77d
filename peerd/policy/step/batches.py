"""Open batches: gradients that wait for the next of a peer's own updates, where steps are local.

In such a run every gradient goes into an open batch, which a record tells as an aside (asides.py). An update of the peer's own
parameters seals a batch: its microbatches then belong to the main sum, which goes only as a whole. An open batch goes alone. So one
is sealed only once its bits have been told for so long that whoever computes the same has seen them, and no member shows one of them: of
what is computed twice an open batch is lost, and hardly ever a ledger. What is open when a round begins is sealed as it is.
"""

from __future__ import annotations

import itertools

from peerd.policy.step.asides import dropped
from peerd.policy.step.situation import Situation
from peerd.table.record import PeerId, PeerRecord, Phase

MOST_OPEN = 2
"""Open batches of a peer: one that fills, and one that is told. Each takes as much memory as the sum of the stage's gradients."""
MOST_EARLIER = 1
"""Versions of a peer's own parameters before the present one that it keeps for microbatches on their way. A seal that needs more waits."""


def batch_for(mine: PeerRecord, local_batch: int) -> PeerId:
    """The name of the open batch for the next gradient: the newest one, or another where that is full and one more may be there."""
    if mine.asides:
        newest = mine.asides[-1]
        if newest.done.bit_count() < local_batch or len(mine.asides) >= MOST_OPEN:
            return newest.other
    names = {aside.other for aside in mine.asides}
    return next(name for number in itertools.count() if (name := PeerId(str(number))) not in names)


def open_dropped(mine: PeerRecord) -> PeerRecord:
    """Without its open batches. T3 (fence) drops these alone: that others have computed the rest as well meanwhile is settled by rule 6."""
    return dropped(mine, [aside.other for aside in mine.asides])


def batch_to_seal(now: Situation) -> PeerId | None:
    """The oldest open batch that is full, has been told for two announce periods as it is, and shares nothing with a member's ledger.

    None while microbatches on their way need as many versions of the parameters as this peer keeps.
    """
    mine, rules = now.mine, now.rules
    local_batch = rules.batch_at(mine.step)
    if not local_batch or mine.phase is not Phase.ACCUMULATING or now.own.keeps_versions:
        return None
    since_s, others = dict(now.own.open_since_s), 0
    for member in now.live.members(mine.stage, mine.step):
        others |= member.done if member.peer != mine.peer else 0
    for aside in mine.asides:
        told_s = now.now_s - since_s.get(aside.other, now.now_s)
        if aside.done.bit_count() >= local_batch and told_s >= rules.seal_after_s and not aside.done & others:
            return aside.other
    return None
