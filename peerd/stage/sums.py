"""The sums of one ledger: the main accumulator, and one for each aside (policy/step/asides.py)."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from peerd.stage.accumulator import Accumulator
from peerd.stage.spool import Spools
from peerd.stage.stored_sum import StoredSum
from peerd.table.record import PeerId

LOG = structlog.get_logger()


class Sums:
    """Every method is a job for the executor's thread."""

    def __init__(self, main: Accumulator, spools: Spools | None = None) -> None:
        self.main = main
        self._spools = spools or Spools()
        self._asides: dict[PeerId, Accumulator | StoredSum] = {}
        """By the peer that may hold the same, where it holds anything. They lie in files where they can."""

    def begin(self, other: PeerId) -> bool:
        """Make room for an aside. False if the device has no memory for it."""
        if other not in self._asides:
            file = self._spools.file(self.main.flat.nbytes)
            try:
                self._asides[other] = StoredSum(self.main, file) if file is not None else self.main.another()
            except RuntimeError as error:  # both of the processor's memory and of a GPU's
                LOG.warning("no memory to sum apart what another peer may hold, too", error=str(error))
                return False
        return True

    def begin_in_memory(self, name: PeerId) -> None:
        """Make room for an open batch (policy/step/batches.py), of which an update is made. Raises what a lack of memory raises."""
        if name not in self._asides:
            self._asides[name] = self.main.another()

    def batch(self, name: PeerId) -> Accumulator:
        """An open batch that lies in memory."""
        found = self._asides[name]
        assert isinstance(found, Accumulator)
        return found

    def of(self, other: PeerId | None) -> Accumulator | StoredSum:
        return self.main if other is None else self._asides[other]

    @property
    def is_void(self) -> bool:
        """Whether a change of a sum failed half way."""
        return any(each.is_void for each in (self.main, *self._asides.values()))

    def void(self) -> None:
        """Nothing in here counts any more. This cannot fail; `make_whole` frees the main sum of what it holds."""
        self._asides.clear()
        self.main.is_void = True

    def make_whole(self) -> None:
        """Empty a main sum that is void."""
        if self.main.is_void:
            self.main.zero()

    def merge(self, other: PeerId) -> None:
        """Add an aside to the main sum."""
        aside = self._asides.pop(other, None)
        if aside is not None:
            aside.add_to(self.main)

    def merge_all(self) -> None:
        for other in list(self._asides):
            self.merge(other)

    def drop(self, others: Iterable[PeerId]) -> None:
        """Drop these asides."""
        for other in others:
            self._asides.pop(other, None)

    def zero(self) -> None:
        self.void()
        self.make_whole()
