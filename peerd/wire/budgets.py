"""What one caller may have of this peer at once: open calls of each method, the size of one message, and tensors on their way.

The numbers are above what an honest peer has open, also while calls over a connection that died are still there. A caller above them hears
when to come back, and is not banned: an honest one loses that pause. Callers share nothing but `MOST_OPEN`, of which a caller that
has little always gets its share, so that none can use up what another needs. Only strangers, which have no record of this run, share
among them what one caller may have: a key costs nothing, so fifty of them must not take fifty times as much.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from peerd.config.manifest import MAX_MICROBATCHES_PER_STEP
from peerd.errors import BusyError
from peerd.link.certificate import MAX_CERTIFICATE_BYTES
from peerd.link.few_each import FewEach, everybody
from peerd.link.links import MAX_REQUEST_BYTES
from peerd.link.strands import BLOCK_BYTES
from peerd.policy.route.parallel import MOST
from peerd.policy.step.receipts import NAME_BYTES
from peerd.table.record import PeerId

MAX_BEAT_BYTES = 1 << 17
"""Two counts for each of 1,024 members, the edges that mates carry, and the slices of a member whose word is disputed."""
MAX_ACCOUNT_BYTES = 1 << 14
"""An account of 31 signers, whom 62 have signed."""
MAX_KNOWN_BYTES = 1 << 12
"""The ids of the convictions that an auditor knows."""
MAX_NAMES_BYTES = MAX_MICROBATCHES_PER_STEP * NAME_BYTES + (1 << 10)
"""The names of the calls to this peer of one step that an auditor knows."""
RETRY_S = 0.25
SMALL_BYTES = 1024
FEW_CALLS = 4
MOST_OPEN, LEAST_SHARE = 4096, 4
"""Open calls of all callers; beyond that a caller gets an equal share of them, and at least the other number."""
MOST_OTHERS = 32
"""Open calls of one caller, beside as many as it may have for microbatches."""
MOST_OF_STRANGERS = 32
"""Open calls of all callers together that have no record: of newcomers, which ask little and briefly, and of keys that cost nothing."""
MOST_PUT_OFF = 16
"""Refusals of one caller's calls, not counted as open, that wait before they are told."""
USELESS_A_SECOND, BURST_S, MOST_DELAY_S = 2, 4.0, 1.0
"""Calls that change nothing: a caller may make so many a second for each microbatch that it may have open, and those of the second number
of seconds at once. Others are answered later, by the third number at most."""
LEAST_ARRIVING = 2


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one caller may have of one method."""

    calls: int = FEW_CALLS
    num_bytes: int = SMALL_BYTES
    """Bytes of one message."""
    is_apart: bool = False
    """Whether they do not count among the calls of all methods: they are small, and the calls that they carry count."""
    per_slot: int = 0
    """So many calls more for each slot of this peer: each slot's microbatch, and as many whose gradients are on their way back."""

    def most_calls(self, slots: int) -> int:
        return self.calls + self.per_slot * slots

    def most_of_strangers(self, slots: int) -> int:
        """What all callers without a record may have together."""
        return most_arriving(slots) if self.per_slot else MOST_OF_STRANGERS


_OTHERS = Allowance()
_ALLOWANCES = {
    "Backpropagate": Allowance(8, MAX_REQUEST_BYTES, per_slot=2),
    "Cancel": Allowance(8, per_slot=2),
    "Converse": Allowance(8, MAX_REQUEST_BYTES),
    "Gossip": Allowance(16, MAX_REQUEST_BYTES),
    "Propose": Allowance(num_bytes=MAX_REQUEST_BYTES),
    "Give": Allowance(8, MAX_REQUEST_BYTES),
    "Beat": Allowance(8, MAX_BEAT_BYTES),
    "Accounts": Allowance(3, MAX_ACCOUNT_BYTES),
    "Carry": Allowance(2 * MOST, BLOCK_BYTES + SMALL_BYTES, is_apart=True),
    "Show": Allowance(num_bytes=MAX_CERTIFICATE_BYTES + SMALL_BYTES),
    "GetReceipts": Allowance(num_bytes=MAX_KNOWN_BYTES),
    "GetSentOn": Allowance(num_bytes=MAX_NAMES_BYTES),
    "TellCase": Allowance(8, MAX_REQUEST_BYTES),
    "Extend": Allowance(num_bytes=MAX_REQUEST_BYTES),
    "Sink": Allowance(num_bytes=MAX_REQUEST_BYTES),
}


def allowance_of(method: str) -> Allowance:
    """What one caller may have of the method of this name."""
    return _ALLOWANCES.get(method, _OTHERS)


def most_of_one(slots: int) -> int:
    """Calls of one caller of all methods together: those for microbatches, and some more. gRPC holds some megabytes of each unread."""
    return allowance_of("Backpropagate").most_calls(slots) + MOST_OTHERS


def most_arriving(slots: int) -> int:
    """Microbatches of one caller whose tensors may arrive at once: a third of the slots. A caller's tensors come one after another."""
    return max(LEAST_ARRIVING, slots // 3)


class OpenCalls:
    """The calls of all callers that are open now. Nothing stays of a caller that has none."""

    def __init__(self, is_known: Callable[[PeerId], bool] = everybody) -> None:
        self._methods = defaultdict[str, FewEach](lambda: FewEach(is_known))
        self._all = FewEach(is_known)
        self.refused = 0
        """Number of calls that were refused because their callers had too many open."""

    @property
    def total(self) -> int:
        return self._all.total

    @contextmanager
    def by(self, caller: PeerId, method: str, allowance: Allowance, slots: int) -> Iterator[None]:
        """Count a call while the block runs. Raises BusyError if the caller has all that it may have, or if all strangers together do."""
        most, of_strangers = allowance.most_calls(slots), allowance.most_of_strangers(slots)
        share = most_of_one(slots) if self.total < MOST_OPEN else max(LEAST_SHARE, MOST_OPEN // self._all.num_callers)
        among_all = contextlib.nullcontext(True) if allowance.is_apart else self._all.by(caller, share, MOST_OF_STRANGERS)
        with self._methods[method].by(caller, most, of_strangers) as may_open, among_all as has_share:
            if not (may_open and has_share):
                self.refused += 1
                raise BusyError(
                    f"too many calls are open here: one caller may have {most} of {method}, one without a record fewer", RETRY_S
                )
            yield


class UselessCalls:
    """What callers asked for lately that changed nothing: calls that were refused, cancels and aborts. Nothing stays of a calm caller.

    They cost this peer time, and the caller hardly any. So where a caller makes them without a pause, their answers wait, and the calls
    stay open and count as such: it gets slower, and nobody else does. An honest caller makes some, too: all the microbatches that it may
    send are refused again and again while the slots are full.
    """

    def __init__(self, is_known: Callable[[PeerId], bool] = everybody) -> None:
        self._is_known = is_known
        self._until_s: dict[PeerId | None, float] = {}
        """When each caller, or None for all strangers together, may have made its useless calls, at its rate. The last caller is last."""

    @property
    def num_callers(self) -> int:
        return len(self._until_s)

    def delay_s(self, caller: PeerId, slots: int, now_s: float) -> float:
        """Count a call of a caller. Returns for how long its answer shall wait. `now_s` never goes back."""
        who = caller if self._is_known(caller) else None
        each_s = 1 / (USELESS_A_SECOND * allowance_of("Backpropagate").most_calls(slots))
        due_s = min(max(now_s, self._until_s.pop(who, now_s)) + each_s, now_s + BURST_S + MOST_DELAY_S)
        self._until_s[who] = due_s
        while self._until_s[first := next(iter(self._until_s))] <= now_s:
            del self._until_s[first]
        return max(0.0, due_s - now_s - BURST_S)
