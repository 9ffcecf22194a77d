"""The secrets of an auditor's coins, to which it is committed before each step: rule 20 (audit). Pure.

The secrets of PERIOD steps are a chain of hashes. That of the last step is drawn, and each earlier one is the hash of the next. The hash
of the first one is the head of the period. A peer's record shows the heads of its present period and of the next one, so others know them
before the period begins. An auditor that accuses shows the secret of the item's step: whoever has the head checks that it is the one of
that step. It tells nothing of later steps, and leaves the auditor no choice of whom it audits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from peerd.policy.hashing import digest
from peerd.table.record import COIN_BYTES, PeerId, PeerRecord

PERIOD = 256
"""Steps of one chain: what the check of one secret may cost, in hashes."""
MOST_PEERS, MOST_PERIODS = 4_096, 4
"""Peers whose heads are remembered, and periods of each; the last ones heard."""


def _next(secret: bytes) -> bytes:
    return digest("coin chain", secret, size=COIN_BYTES)


@lru_cache(maxsize=16)
def secret_of(seed: bytes, step: int) -> bytes:
    """The secret of a step. `seed`: what nobody but the auditor knows, the same after a restart."""
    secret = digest("coins", seed, step // PERIOD, size=COIN_BYTES)
    for _ in range(PERIOD - 1 - step % PERIOD):
        secret = _next(secret)
    return secret


@lru_cache(maxsize=16)
def _head_of(seed: bytes, period: int) -> bytes:
    return _next(secret_of(seed, period * PERIOD))


def heads_of(seed: bytes, step: int) -> bytes:
    """What the record of a peer at this step shows: the heads of the step's period and of the next one."""
    return _head_of(seed, step // PERIOD) + _head_of(seed, step // PERIOD + 1)


def head_behind(secret: bytes, step: int) -> bytes:
    """The head of the period in which this is the secret of this step."""
    for _ in range(step % PERIOD + 1):
        secret = _next(secret)
    return secret


@dataclass(slots=True)
class Commitments:
    """The heads that this peer has heard of others, the first of each period, and at which step it was then."""

    _heads: OrderedDict[PeerId, OrderedDict[int, tuple[bytes, int]]] = field(default_factory=OrderedDict)

    def note(self, record: PeerRecord, step: int) -> None:
        """Note what a record shows. `step`: where this peer is. A head that comes after another one of its period does not count."""
        if len(record.coins) != 2 * COIN_BYTES:
            return
        period, own = record.step // PERIOD, self._heads.setdefault(record.peer, OrderedDict())
        for number in (0, 1):
            own.setdefault(period + number, (record.coins[number * COIN_BYTES : (number + 1) * COIN_BYTES], step))
        while len(own) > MOST_PERIODS:
            own.popitem(last=False)
        while len(self._heads) > MOST_PEERS:
            self._heads.popitem(last=False)

    def has_committed(self, peer: PeerId, secret: bytes, step: int) -> bool:
        """Whether this is the peer's secret of a step, by a head that this peer had heard before the step.

        At step 0 all are founders, whose heads come with the step.
        """
        own: Mapping[int, tuple[bytes, int]] = self._heads.get(peer, OrderedDict())
        head, heard_at = own.get(step // PERIOD, (b"", 0))
        return (heard_at < step or step == 0) and len(secret) == COIN_BYTES and head_behind(secret, step) == head
