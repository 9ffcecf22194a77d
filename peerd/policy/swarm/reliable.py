"""Reliable peers: those whose owner says that they mean to stay (`peerd join --stay HOURS`). Each stage should keep one.

In a swarm of spot machines and home computers that come and go, a stage whose peers all go at once loses its state, and the run
goes back to a checkpoint (rule 14, recover). A peer that means to stay holds the state meanwhile, and those that come and go do
microbatches (as in the hybrid parameter server of Yang et al.). So a reliable joiner goes where reliable peers do least, no plan
moves a stage's last one, and donors, givers of data and relays that mean to stay are asked first.

Nothing proves the claim, so no rule of a step goes by it. A round needs the parts of all its members, whoever leads it, so a reliable
leader would save nothing, and a liar that always leads could be silent in each step. What a false claim gains is to be asked first for
what is checked against others' hashes anyway, and that no other reliable peer comes to its stage: then that stage is as it would be
without the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from peerd.table.record import PeerId, PeerRecord, Phase


def num_reliable(records: Sequence[PeerRecord], num_stages: int) -> list[int]:
    """The number of reliable peers of each stage, those that still download included."""
    counted = Counter(record.stage for record in records if record.is_reliable)
    return [counted[stage] for stage in range(num_stages)]


def last_reliable(records: Sequence[PeerRecord]) -> frozenset[PeerId]:
    """The peers that no plan moves: each is the only reliable one that serves its stage."""
    serving = [record for record in records if record.is_reliable and record.phase is not Phase.JOINING]
    counted = Counter(record.stage for record in serving)
    return frozenset(record.peer for record in serving if counted[record.stage] == 1)


def without_reliable(records: Sequence[PeerRecord], stages: Sequence[int]) -> list[int]:
    """Those of some stages that no reliable peer serves or is about to serve."""
    have = {record.stage for record in records if record.is_reliable}
    return [stage for stage in stages if stage not in have]
