"""Spans record what a peer did between two moments; a ring keeps the latest.

Recording is always on: a span costs one to three microseconds, and a microbatch makes about ten at each stage. Spans are packed
into memory allocated at the start: as objects they took five times as much, and a peer grew for an hour until its ring was full.
"""

from __future__ import annotations

import enum
import itertools
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_SPANS = 32_768
"""The spans of about 3,000 microbatches; with 40 bytes each they take 1.3 MB."""
_PACKED = struct.Struct("<ddqqiHBx")
"""Fields: began, ended, step, bytes, microbatch, number of the other peer, kind."""
_MAX_NAMES = 65_536


class SpanKind(enum.IntEnum):
    """What was done. The numbers travel: never give a number a new meaning."""

    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD = 3
    OPTIMIZER = 4
    COMMIT = 5
    """A commit, without the optimizer's step."""
    QUEUED = 6
    """A microbatch waits for the compute thread."""
    BELOW = 7
    """A microbatch waits for the gradient from the next stage; includes that stage's wire and compute time."""
    SEND = 8
    """Tokens or activations are sent."""
    RECEIVE = 9
    SEND_GRADIENT = 10
    RECEIVE_GRADIENT = 11
    EXCHANGE = 12
    """One slice of an average: this peer's part is sent and the reduced slice received; includes waiting for the others' parts."""
    ACCUMULATING = 13
    AVERAGING = 14
    AVERAGED = 15
    """The peer waits until every stage has averaged."""


COMPUTE = frozenset({SpanKind.FORWARD, SpanKind.RECOMPUTE, SpanKind.BACKWARD})
WIRE = frozenset({SpanKind.SEND, SpanKind.RECEIVE, SpanKind.SEND_GRADIENT, SpanKind.RECEIVE_GRADIENT})
UPDATE = frozenset({SpanKind.OPTIMIZER, SpanKind.COMMIT})
STEP_END = frozenset({SpanKind.AVERAGING, SpanKind.AVERAGED}) | UPDATE
PHASES = frozenset({SpanKind.ACCUMULATING, SpanKind.AVERAGING, SpanKind.AVERAGED})


class Span(NamedTuple):
    """One activity of a peer. Times are seconds on the peer's own monotonic clock."""

    kind: SpanKind
    began_s: float
    ended_s: float
    step: int
    microbatch: int = -1
    """-1 if the span belongs to no microbatch."""
    peer: str = ""
    """The other peer, for tensors that cross the wire."""
    num_bytes: int = 0


class SpanRing:
    """The latest `most` spans of one peer. Any thread may add spans."""

    def __init__(self, most: int = MAX_SPANS) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._packed = bytearray(most * _PACKED.size)
        self._added = 0
        """Number of spans ever added, overwritten ones included."""
        self._numbers: dict[str, int] = {"": 0}
        self._names = [""]
        self.spent_s: dict[SpanKind, float] = dict.fromkeys(SpanKind, 0.0)
        """Total time of each kind, overwritten spans included. One thread alone adds spans of a given kind."""

    def add(self, kind: SpanKind, began_s: float, step: int, microbatch: int = -1, peer: str = "", num_bytes: int = 0) -> None:
        """Add a span that began at `began_s` and ends now."""
        self.put(Span(kind, began_s, time.monotonic(), step, microbatch, peer, num_bytes))

    def put(self, span: Span) -> None:
        kind, began_s, ended_s, step, microbatch, peer, num_bytes = span
        self.spent_s[kind] += ended_s - began_s
        if not self._most:
            return
        with self._guard:
            place = self._added % self._most * _PACKED.size
            _PACKED.pack_into(self._packed, place, began_s, ended_s, step, num_bytes, microbatch, self._number_of(peer), kind)
            self._added += 1

    def of_steps(self, first: int, last: int, most: int) -> tuple[list[Span], bool]:
        """The newest `most` spans of these steps, in order of their ends, and whether these are all there were."""
        known = list(self._newest_first())[::-1]
        wanted = [span for span in known if first <= span.step <= last]
        forgotten = 0 < len(known) == self._most and known[0].step >= first
        return wanted[-most:] if most else [], not forgotten and len(wanted) <= most

    def of_microbatch(self, step: int, microbatch: int, since_s: float) -> list[Span]:
        """The microbatch's spans that ended after `since_s`, in order."""
        recent = itertools.takewhile(lambda span: span.ended_s >= since_s, self._newest_first())
        return [span for span in recent if (span.step, span.microbatch) == (step, microbatch)][::-1]

    def _newest_first(self) -> Iterator[Span]:
        with self._guard:
            packed, added = bytes(self._packed), self._added
        for slot in range(added - 1, max(0, added - self._most) - 1, -1):
            fields = _PACKED.unpack_from(packed, slot % self._most * _PACKED.size)
            began_s, ended_s, step, num_bytes, microbatch, number, kind = fields
            yield Span(SpanKind(kind), began_s, ended_s, step, microbatch, self._names[number], num_bytes)

    def _number_of(self, peer: str) -> int:
        """The number that stands for a peer id. Ids beyond the first 65,535 get 0, which stands for no peer."""
        number = self._numbers.get(peer)
        if number is None and len(self._names) < _MAX_NAMES:
            number = self._numbers[peer] = len(self._names)
            self._names.append(peer)
        return number or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimeline:
    """The spans of one peer."""

    peer: str
    stage: int
    spans: Sequence[Span]
    complete: bool = True
    """False if the earliest spans were overwritten, or there were more than one reply holds."""
    offset_s: float = 0.0
    """Seconds that were added to the peer's times to convert them to the asker's clock."""
    offset_error_s: float = 0.0
    """The largest possible error of `offset_s`: half the round trip."""
