"""The peer at which a test's rounds and stepper run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from peerd.averaging.absences import Absences
from peerd.errors import StageError, WrongStateError
from peerd.policy.step.certificates import Slices
from peerd.stage.kept_parts import KeptParts
from peerd.stage.results import HeldAverage
from peerd.stage.snapshots import Downloaded
from peerd.table.record import NO_RECORD, AverageId, PeerId, RawRecord, RunId

RUN = RunId("run")


class PaperRounds:
    """Rounds of a stepper that opens none and fetches nothing."""

    open = last = None

    def __init__(self) -> None:
        self.fetcher = self
        self.absences = Absences(PeerId("me"), averaging_s=1.0)
        self.joined: dict[AverageId, Slices] = {}
        self.large = self

    async def fetch(self, *_arguments: object) -> HeldAverage:
        raise WrongStateError("there is none")

    def applied(self, held: HeldAverage) -> None: ...

    def spares(self, _roster: object) -> bool:
        return False

    async def close_present(self, reason: str) -> None: ...


@dataclass
class PaperHost:
    """Notes what it is told."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    told: list[str] = field(default_factory=list)
    heard: list[RawRecord] = field(default_factory=list)
    failed: list[PeerId] = field(default_factory=list)
    strangers: set[PeerId] = field(default_factory=set)
    """Peers that are not known to serve this stage."""
    known: set[PeerId] = field(default_factory=set)
    """Peers that a proposal may name by their marks."""
    rates: dict[PeerId, tuple[float | None, float | None]] = field(default_factory=dict)
    cut: set[tuple[PeerId, PeerId]] = field(default_factory=set)
    """Pairs of mates of which neither can call the other."""
    gone: set[PeerId] = field(default_factory=set)
    """Peers whose records do not rise any more."""
    oversized: list[tuple[PeerId, int]] = field(default_factory=list)
    """Peers whose parts were too large, and the steps."""
    record: RawRecord = NO_RECORD
    run: RunId = RUN
    kept_parts: KeptParts | None = None
    key: bytes = b""
    """Signs; the peer's id, where others are to believe it."""
    is_committing: bool = False
    needed_from: Callable[[], int | None] = lambda: None
    """What `averages_needed_from` returns."""
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep
    """What `until_committed` does."""

    def own_record(self) -> RawRecord:
        return self.record

    def learn(self, *records: RawRecord) -> None:
        self.heard += records

    def is_mate(self, peer: PeerId) -> bool:
        return peer not in self.strangers

    def mates(self) -> Iterable[PeerId]:
        return self.known

    def sign(self, message: bytes) -> bytes:
        return blake3(self.key + message).digest()

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == blake3(peer.encode() + message).digest()

    def pass_s(self) -> float:
        return 0.0

    def rose_s(self, peer: PeerId) -> float:
        return -math.inf if peer in self.gone else math.inf

    def cut_links(self) -> Collection[tuple[PeerId, PeerId]]:
        return self.cut

    def is_lossy(self, _peer: PeerId) -> bool:
        return False

    def is_near(self, _peer: PeerId) -> bool:
        return False

    def rates_of(self, peer: PeerId) -> tuple[float | None, float | None]:
        return self.rates.get(peer, (None, None))

    def delivered(self, peer: PeerId, num_bytes: int, took_s: float) -> None: ...

    def too_large(self, peer: PeerId, step: int) -> None:
        self.oversized.append((peer, step))

    def report_failure(self, peer: PeerId) -> None:
        self.failed.append(peer)

    def cannot_compute(self) -> None:
        self._note("cannot compute")

    def own_records(self) -> tuple[RawRecord, ...]:
        return ()

    def absorb(self, records: Sequence[RawRecord], sender: PeerId) -> None:
        self.heard += records

    def why_refuse_caller(self, caller: PeerId, _stage: int) -> str | None:
        return "a stranger" if caller in self.strangers else None

    def ledger_grew(self) -> None:
        self._note("ledger grew")

    async def until_committed(self, timeout_s: float) -> None:
        await self.wait(timeout_s)

    def round_opened(self) -> None:
        self._note("round opened")

    def announce(self) -> None:
        self._note("announced")

    def committed(self) -> None:
        self._note("committed")

    def averages_needed_from(self) -> int | None:
        return self.needed_from()

    def applied(self, held: HeldAverage) -> None:
        self._note(f"applied {held.roster.step}")

    def load_checkpoint(self, step: int) -> Downloaded | None:
        return None

    async def load_start(self) -> Downloaded:
        raise StageError("there is none")

    def _note(self, what: str) -> None:
        self.told.append(what)
        self.changed.set()
