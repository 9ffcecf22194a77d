"""A span is one thing a peer did from one moment to another; the ring keeps a peer's last ones.

Always on: adding a span costs one to three microseconds, and a microbatch makes about ten at each stage. They are kept packed, in
memory taken at the start: as objects they took five times as much, and a peer grew for an hour until its ring was full.
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
"""Of 40 bytes each, 1.3 MB in all: the last 3,000 microbatches."""
_PACKED = struct.Struct("<ddqqiHBx")
"""Began, ended, step, bytes, microbatch, number of the other end, kind."""
_MAX_NAMES = 65_536


class SpanKind(enum.IntEnum):
    """What was done. The numbers travel: never give one another meaning."""

    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD = 3
    OPTIMIZER = 4
    COMMIT = 5
    """The rest of a commit but for the optimizer."""
    QUEUED = 6
    """A microbatch waits for the compute thread."""
    BELOW = 7
    """A microbatch waits for the gradient from the next stage: its wire and compute included."""
    SEND = 8
    """Tokens or activations go out."""
    RECEIVE = 9
    SEND_GRADIENT = 10
    RECEIVE_GRADIENT = 11
    EXCHANGE = 12
    """One slice of an average: my part goes out, the reduced slice comes in; waiting for the others' parts included."""
    ACCUMULATING = 13
    AVERAGING = 14
    AVERAGED = 15
    """Waits until every stage has averaged."""


COMPUTE = frozenset({SpanKind.FORWARD, SpanKind.RECOMPUTE, SpanKind.BACKWARD})
WIRE = frozenset({SpanKind.SEND, SpanKind.RECEIVE, SpanKind.SEND_GRADIENT, SpanKind.RECEIVE_GRADIENT})
UPDATE = frozenset({SpanKind.OPTIMIZER, SpanKind.COMMIT})
STEP_END = frozenset({SpanKind.AVERAGING, SpanKind.AVERAGED}) | UPDATE
PHASES = frozenset({SpanKind.ACCUMULATING, SpanKind.AVERAGING, SpanKind.AVERAGED})


class Span(NamedTuple):
    """Times are of the peer's own monotonic clock, seconds."""

    kind: SpanKind
    began_s: float
    ended_s: float
    step: int
    microbatch: int = -1
    """-1 where it is about none."""
    peer: str = ""
    """The other end, for what crosses the wire."""
    num_bytes: int = 0


class SpanRing:
    """The last `most` spans of one peer. Any thread may add."""

    def __init__(self, most: int = MAX_SPANS) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._packed = bytearray(most * _PACKED.size)
        self._added = 0
        """In all, forgotten ones too."""
        self._numbers: dict[str, int] = {"": 0}
        self._names = [""]
        self.spent_s: dict[SpanKind, float] = dict.fromkeys(SpanKind, 0.0)
        """In all, forgotten ones too. Each kind is added by one thread only."""

    def add(self, kind: SpanKind, began_s: float, step: int, microbatch: int = -1, peer: str = "", num_bytes: int = 0) -> None:
        """What began then and ends now."""
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
        """The newest `most` spans of these steps, in order of their ends, and whether those are all there were."""
        known = list(self._newest_first())[::-1]
        wanted = [span for span in known if first <= span.step <= last]
        forgotten = 0 < len(known) == self._most and known[0].step >= first
        return wanted[-most:] if most else [], not forgotten and len(wanted) <= most

    def of_microbatch(self, step: int, microbatch: int, since_s: float) -> list[Span]:
        """Its spans that ended after `since_s`, in order."""
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
        """A short name for a long one. Who meets more than 65,535 others calls the rest none."""
        number = self._numbers.get(peer)
        if number is None and len(self._names) < _MAX_NAMES:
            number = self._numbers[peer] = len(self._names)
            self._names.append(peer)
        return number or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimeline:
    """What one peer did, on whichever clock."""

    peer: str
    stage: int
    spans: Sequence[Span]
    complete: bool = True
    """False where the peer had forgotten the earliest, or had more than it could tell."""
    offset_s: float = 0.0
    """What was added to the peer's clock to make it the asker's."""
    offset_error_s: float = 0.0
    """The true offset is no further than this from the estimate: half the round trip."""
