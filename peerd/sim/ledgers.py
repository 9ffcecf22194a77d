"""Which simulated peer holds which microbatch: the ledgers of all peers, and what a death takes from them."""

from __future__ import annotations

from collections import defaultdict

from peerd.policy.step.ledger import full, indices
from peerd.policy.step.roster import RosterEntry, why_inexact
from peerd.table.record import PeerId

NOBODY = -1
Held = tuple[int, int, int]
"""Stage, step and index of a microbatch."""


class Ledgers:
    """Tells who holds which microbatch in the steps that are under way. Peers go by their numbers."""

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        self._num_stages, self._num_microbatches = num_stages, num_microbatches
        self._holders: dict[int, list[list[int]]] = {}
        """By step and stage, the holder of each microbatch."""
        self._done: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        """By stage and step, each member's bitmap."""
        self.suppressed = 0
        """Microbatches that were computed though another member held them already."""

    def open(self, step: int) -> None:
        self._holders[step] = [[NOBODY] * self._num_microbatches for _ in range(self._num_stages)]

    def close(self, step: int) -> None:
        del self._holders[step]
        for stage in range(self._num_stages):
            self._done.pop((stage, step), None)

    def holder(self, stage: int, step: int, index: int) -> int:
        """`NOBODY` where no live peer holds it; also of a step that is over."""
        found = self._holders.get(step)
        return found[stage][index] if found is not None else NOBODY

    def is_missing_from(self, stage: int, step: int, index: int) -> bool:
        """Whether this stage or a later one lacks a microbatch of a step under way."""
        found = self._holders.get(step)
        return found is not None and any(found[later][index] == NOBODY for later in range(stage, self._num_stages))

    def add(self, stage: int, step: int, index: int, number: int) -> bool:
        """Add a microbatch to a peer's ledger. False if a peer of the stage holds it, or the step is over."""
        found = self._holders.get(step)
        if found is None or found[stage][index] != NOBODY:
            self.suppressed += 1
            return False
        found[stage][index] = number
        done = self._done[stage, step]
        done[number] = done.get(number, 0) | 1 << index
        return True

    def is_complete(self, stage: int, step: int) -> bool:
        union = 0
        for bitmap in self._done[stage, step].values():
            union |= bitmap
        return union == full(self._num_microbatches)

    def drop(self, stage: int, number: int, averaged: frozenset[int]) -> list[Held]:
        """Take a dead peer's ledgers away, but for steps that its stage has `averaged`. Returns what is missing now."""
        missing = list[Held]()
        for step, holders in self._holders.items():
            if step in averaged:
                continue
            for index in indices(self._done[stage, step].pop(number, 0)):
                holders[stage][index] = NOBODY
                missing.append((stage, step, index))
        return missing

    def why_inexact(self, stage: int, step: int) -> str | None:
        """What the daemons' own check finds wrong with a roster of these ledgers."""
        names = {number: PeerId(f"{number:08}") for number in self._done[stage, step]}
        entries = [RosterEntry(names[number], 0, 1, done) for number, done in self._done[stage, step].items()]
        return why_inexact(sorted(entries), self._num_microbatches)
