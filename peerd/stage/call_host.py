"""What the calls of a stage need of the peer around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from peerd.table.record import PeerId, RawRecord
from peerd.wire.messages import Call, CallResult


class NextHop(Protocol):
    """Takes a microbatch on to a later stage."""

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult: ...

    def distrust(self, call: Call, peer: PeerId) -> None:
        """Note that this peer returned a broken result."""
        ...


class CallHost(Protocol):
    """The peer that serves the stage, as calls see it."""

    @property
    def is_committing(self) -> bool:
        """Whether this step is over and the next one about to begin, however long the optimizer takes."""

    async def until_committed(self, timeout_s: float) -> None:
        """Wait until this peer is at another step, or for `timeout_s` seconds."""

    def cannot_compute(self) -> None:
        """Note that the device's memory does not suffice for this stage, however little it holds."""

    def own_records(self) -> Sequence[RawRecord]:
        """Return this peer's record, which a reply carries; a new version only if something in it has changed."""

    def absorb(self, records: Sequence[RawRecord], sender: PeerId) -> None:
        """Take records that came with a call. Raises BadMessageError if the sender's own is broken."""

    def why_refuse_caller(self, caller: PeerId, stage: int) -> str | None:
        """The reason why a peer may send no microbatches to a stage; None if it may."""

    def ledger_grew(self) -> None: ...
