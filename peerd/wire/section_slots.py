"""A peer gives sections of averages to few others at a time, so that each is soon done (policy/step/sections.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from peerd.errors import BusyError
from peerd.link.few_each import FewEach
from peerd.policy.step.sections import SECTIONS_AT_ONCE
from peerd.table.record import PeerId
from peerd.wire.deliveries import Lending

MOST_OF_OTHERS = 1
"""Sections on their way to peers that do not serve this stage, all together: only a mate that is new here needs one."""


class SectionSlot:
    """The slot of one section that is given."""

    lending: Lending | None = None
    """None while the section is looked for."""

    @property
    def is_taken(self) -> bool:
        """False while the receiver lets this peer wait most of the time: the line is free for others meanwhile (hole 75)."""
        return self.lending is None or not self.lending.is_idle


class SectionSlots:
    """Each section that is given takes a slot, as long as it waits for this peer's line."""

    def __init__(self, mates: Callable[[], Collection[PeerId]]) -> None:
        self._each = FewEach(lambda caller: caller in mates())
        self._slots: list[SectionSlot] = []

    @contextlib.contextmanager
    def by(self, caller: PeerId) -> Iterator[SectionSlot]:
        """A slot for a section that is given to a caller while the block runs. Raises BusyError if none is free for it."""
        with self._each.by(caller, SECTIONS_AT_ONCE, MOST_OF_OTHERS) as may_take:
            if not may_take or sum(slot.is_taken for slot in self._slots) >= SECTIONS_AT_ONCE:
                raise BusyError("this peer gives sections to others just now")
            slot = SectionSlot()
            self._slots.append(slot)
            try:
                yield slot
            finally:
                self._slots.remove(slot)
