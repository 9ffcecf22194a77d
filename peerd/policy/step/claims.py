"""How long a run waits for peers to load the checkpoints that they claim: rule J3 (resume), hole 69.

A record says which steps a peer has on its disk, and nothing shows that before it has loaded one. A claim that everybody waits for, and
that its peer does not make good, is believed no more for a while. So the run resumes at a step that others can provide.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from peerd.policy.step.recovery import peers_to_load
from peerd.policy.step.situation import StepRules
from peerd.policy.step.steady import TotalTime
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

WAITS = 3.0
"""An honest peer has loaded after so many times as long as anything is waited for that is given up then (`lost_wait_s`): other stages go
back first, a step that costs another one is settled later, and a large state takes long to read."""
TIMES_ITS_COST = 8.0
"""A peer that has let others wait is not believed for so many times as long."""


class Claims:
    """What one peer remembers of others' claims. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._waited: dict[PeerId, TotalTime] = {}
        self._doubted_until_s: dict[PeerId, float] = {}

    @property
    def doubted(self) -> frozenset[PeerId]:
        """Those whose checkpoints are not believed."""
        return frozenset(self._doubted_until_s)

    def believed(self, live: LiveView, mine: PeerRecord, rules: StepRules, now_s: float) -> LiveView:
        """The view without the checkpoints that are not believed. It is the same one as long as nobody is waited for."""
        self._doubted_until_s = {peer: until_s for peer, until_s in self._doubted_until_s.items() if now_s < until_s}
        found = _without(live, self._doubted_until_s.keys())
        awaited = peers_to_load(mine, found, rules)
        if not awaited and not self._waited:
            return found
        serving = {record.peer for record in live.records if record.phase is not Phase.JOINING}
        self._waited = {peer: waited for peer, waited in self._waited.items() if peer not in serving}
        late = set[PeerId]()
        for peer in awaited | self._waited.keys():
            since_s = self._waited.setdefault(peer, TotalTime()).since_s(peer, peer in awaited, now_s)
            if since_s is not None and now_s - since_s >= WAITS * rules.lost_wait_s:
                self._doubted_until_s[peer] = now_s + TIMES_ITS_COST * (now_s - since_s)
                late.add(peer)
        for peer in late:
            del self._waited[peer]
        return _without(found, late) if late else found


def _without(live: LiveView, doubted: Collection[PeerId]) -> LiveView:
    if not doubted:
        return live
    return replace(live, records=tuple(replace(r, checkpoints=()) if r.peer in doubted else r for r in live.records))
