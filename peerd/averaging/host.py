"""The interface by which rounds use the peer that runs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from peerd.stage.kept_parts import KeptParts
from peerd.stage.results import HeldAverage
from peerd.table.record import PeerId, RawRecord, RunId


class RoundHost(Protocol):
    """The peer that runs the rounds."""

    @property
    def run(self) -> RunId:
        """The run's id, which everything names that is signed."""

    @property
    def kept_parts(self) -> KeptParts | None:
        """Where mates' parts are kept for audits; None in a run without them."""

    def own_record(self) -> RawRecord:
        """Return this peer's record as it is; a new version only if something in it has changed."""

    def sign(self, message: bytes) -> bytes:
        """Return this peer's signature of a message."""

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Return whether a message has this peer's signature."""

    def learn(self, *records: RawRecord) -> None:
        """Take the record of a member that did not join, because the leader's copy of it was out of date; or two statements of slices of
        one round that one reducer has signed, which prove that it lies."""

    def is_mate(self, peer: PeerId) -> bool:
        """Whether the table knows `peer` as one of this stage."""

    def mates(self) -> Iterable[PeerId]:
        """Return all peers that the table knows as ones of this stage, live or not, this peer included."""

    def pass_s(self) -> float:
        """Return how many seconds a microbatch takes in all stages, at the slowest peer of each; 0 while that is not known."""

    def rose_s(self, peer: PeerId) -> float:
        """Return when the record of a peer last rose, on the clock of the rounds; minus infinity if it has none."""

    def cut_links(self) -> Collection[tuple[PeerId, PeerId]]:
        """Return the pairs of peers of this stage of which neither can call the other, in both orders."""

    def is_lossy(self, peer: PeerId) -> bool:
        """Whether so many packets to a peer are lost that tensors take several connections."""

    def is_near(self, peer: PeerId) -> bool:
        """Whether a peer is on this machine, or is this one."""

    def rates_of(self, peer: PeerId) -> tuple[float | None, float | None]:
        """Return the bytes per second up and down that are believed of a peer; None where nothing is known."""

    def delivered(self, peer: PeerId, num_bytes: int, took_s: float) -> None:
        """Note that a peer has verified so many bytes, `took_s` seconds after the first of them was sent."""

    def report_failure(self, peer: PeerId) -> None:
        """Note that a call to `peer` failed."""

    def round_opened(self) -> None:
        """Note that a round has opened. There is no need to announce it: its members know it from the roster."""

    def announce(self) -> None:
        """Publish this peer's record, because a round has ended."""

    def averages_needed_from(self) -> int | None:
        """The first step whose average a joiner needs, or may need soon; None if nobody joins this stage."""

    def too_large(self, peer: PeerId, step: int) -> None:
        """Note that a mate's part of the average of a step is too large for what it is the sum of."""

    def applied(self, held: HeldAverage) -> None:
        """Note that an average was applied to the parameters, in a step or while catching up."""
