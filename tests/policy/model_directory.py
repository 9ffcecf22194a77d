"""The directory of the protocol model: it answers late, and forgets what is not stored anew."""

from __future__ import annotations

from collections.abc import Sequence

from peerd.table.record import PeerId, PeerRecord

LIFE_S = 4.0
"""As in the daemon, a little longer than a record lives: a dead peer's record may be read for the first time after its end."""


class Directory:
    def __init__(self) -> None:
        self._stored: dict[PeerId, tuple[PeerRecord, float]] = {}

    def store(self, records: Sequence[PeerRecord], now_s: float) -> None:
        for record in records:
            known = self._stored.get(record.peer)
            if known is None or known[1] <= now_s or record.pair > known[0].pair:  # a peer that has lost its incarnation begins anew
                self._stored[record.peer] = record, now_s + LIFE_S

    def records(self, now_s: float) -> tuple[PeerRecord, ...]:
        return tuple(record for record, until_s in self._stored.values() if now_s < until_s)

    def clear(self) -> None:
        self._stored.clear()
