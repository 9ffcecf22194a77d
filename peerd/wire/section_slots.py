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


class SectionSlots:
    """Each section that is given takes a slot, as long as it waits for this peer's line.

    One whose receiver lets this peer wait most of the time takes none: the line is free for others meanwhile (hole 75).
    """

    def __init__(self, mates: Callable[[], Collection[PeerId]]) -> None:
        self._each = FewEach(lambda caller: caller in mates())
        self._given: list[Lending] = []
        self._num_begun = 0
        """Those that are looked for, and not lent yet."""

    @contextlib.contextmanager
    def by(self, caller: PeerId) -> Iterator[Callable[[Lending], None]]:
        """Give a section to a caller while the block runs, which tells what is lent. Raises BusyError if no slot is free for it."""
        with self._each.by(caller, SECTIONS_AT_ONCE, MOST_OF_OTHERS) as may_take:
            if not may_take or self._num_begun + sum(not lending.is_idle for lending in self._given) >= SECTIONS_AT_ONCE:
                raise BusyError("this peer gives sections to others just now")
            lent = list[Lending]()
            self._num_begun += 1

            def lends(lending: Lending) -> None:
                lent.append(lending)
                self._given.append(lending)
                self._num_begun -= 1

            try:
                yield lends
            finally:
                self._num_begun -= not lent
                for lending in lent:
                    self._given.remove(lending)
