"""Mates that do not show what their part of an average is made of, and how long they are left out for that: rule 20 (audit). Pure.

The same is done with one whose part is far too large for what it is the sum of: rule 22 (size), at the first time.

What a peer adds to its ledger it signs in a receipt, so it can show one receipt for each microbatch of its part, and no two. One that does
not has told no falsehood, so it is not convicted. Its part can only be believed, so others do its share of the steps that follow.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from peerd.policy.step.verdicts import MOST_DOUBLED, PAUSE_STEPS
from peerd.table.record import PeerId

ENOUGH, OF_THE_LAST = 2, 10
"""A peer is left out once it has withheld receipts in so many of the last steps: one time may be an accident of the network."""
MOST_WITHHOLDING = 1_024
"""Peers that are remembered, the last ones."""


@dataclass(slots=True)
class _Withheld:
    steps: list[int] = field(default_factory=list)
    num_pauses: int = 0
    until: int = -1
    """The last step without it."""


@dataclass(slots=True)
class Withholding:
    """What one peer has seen of its mates."""

    _known: OrderedDict[PeerId, _Withheld] = field(default_factory=OrderedDict)

    def withheld(self, peer: PeerId, step: int, enough: int = ENOUGH) -> bool:
        """Note that a mate shows no receipts of its part of a step, or that its part is too large. Returns whether it is left out for that.

        The first time it is left out for PAUSE_STEPS steps after the next one, and twice as long each further time.
        """
        known = self._known.setdefault(peer, _Withheld())
        self._known.move_to_end(peer)
        if len(self._known) > MOST_WITHHOLDING:
            self._known.popitem(last=False)
        known.steps = [each for each in known.steps if step - OF_THE_LAST < each < step] + [step]
        if len(known.steps) < enough:
            return False
        known.until = step + 1 + PAUSE_STEPS * 2 ** min(known.num_pauses, MOST_DOUBLED)
        known.num_pauses += 1
        known.steps = []
        return True

    def left_out(self, step: int) -> tuple[PeerId, ...]:
        """The peers that this one leaves out of a step, in the order of their ids."""
        return tuple(sorted(peer for peer, known in self._known.items() if step <= known.until))
