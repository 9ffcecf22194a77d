"""Counters of the bytes that this daemon has sent and received, by kind and role of the peer, and the rate of each link."""

from __future__ import annotations

import enum
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message as ProtoMessage

from peerd.config.codec import NONE, Codec
from peerd.link.lanes import Waiting
from peerd.link.line import OwnLine
from peerd.link.uplink import Uplink
from peerd.policy.route.compressing import RateMeter
from peerd.table.record import PeerId

Reply = TypeVar("Reply", bound=ProtoMessage)


class PeerRole(enum.StrEnum):
    """The role of the peer at the other end of a transfer, seen from this peer."""

    TRAINER = "trainer"
    """It launched the microbatch that is computed here."""
    PREVIOUS_STAGE = "previous_stage"
    NEXT_STAGE = "next_stage"
    """For a trainer this is stage 0."""
    STAGE_PEER = "stage_peer"
    """It averages with this peer."""
    DONOR = "donor"
    """This peer downloads from it."""
    RECIPIENT = "recipient"
    """It downloads from this peer."""


class Way(enum.StrEnum):
    """The way that tensors take to a peer."""

    DIRECT = "direct"
    TUNNEL = "tunnel"


Link = tuple[PeerId, Way]
"""A peer and a way to it. Each link has rates of its own."""


@dataclass(slots=True)
class Traffic:
    """Bytes of RPC payload that this daemon has sent and received, tensors and messages alike."""

    sent_bytes: int = 0
    received_bytes: int = 0
    boundary_bytes: int = 0
    boundary_crossings: int = 0
    tensors: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    """Bytes of tensors and files, by kind, codec, role of the peer at the other end, and direction (sent or received)."""
    incoming: defaultdict[Link, RateMeter] = field(default_factory=lambda: defaultdict(RateMeter))
    """The rates at which tensors arrive here."""
    outgoing: dict[Link, float] = field(default_factory=dict)
    """Bytes per second at which this peer's tensors arrive at the other end, as that end has measured and told."""
    heard_s: dict[PeerId, float] = field(default_factory=dict)
    """When bytes last came from each peer (`time.monotonic`), by whichever way."""
    line: OwnLine = field(default_factory=OwnLine)
    """The rates of the line that all links of this peer share."""
    waiting: Waiting = field(default_factory=Waiting)
    """Microbatches and gradients that wait until others to the same peer have left."""
    taken: dict[PeerId, Way] = field(default_factory=dict)
    """The way that the last microbatch to each peer took."""
    uplink: Uplink = field(init=False)

    def __post_init__(self) -> None:
        self.uplink = Uplink(lambda: self.line.measured.up)

    def sent(self, what: str, role: PeerRole, num_bytes: int, codec: Codec = NONE) -> None:
        self.tensors[what, str(codec), role, "sent"] += num_bytes

    def received(self, what: str, role: PeerRole, num_bytes: int, codec: Codec = NONE) -> None:
        self.tensors[what, str(codec), role, "received"] += num_bytes

    def gave(self, what: str, role: PeerRole, num_bytes: int) -> None:
        """Count bytes of a download from this peer, both in total and by kind."""
        self.sent_bytes += num_bytes
        self.sent(what, role, num_bytes)

    def took(self, what: str, role: PeerRole, num_bytes: int) -> None:
        """Count bytes of a download to this peer, both in total and by kind."""
        self.received_bytes += num_bytes
        self.received(what, role, num_bytes)

    def answered(self, request: ProtoMessage, reply: Reply) -> Reply:
        """Count a request and its reply, and return the reply."""
        self.received_bytes += request.ByteSize()
        self.sent_bytes += reply.ByteSize()
        return reply

    @contextmanager
    def receiving(self, link: Link, num_bytes: int) -> Iterator[None]:
        """Measure the arrival of `num_bytes` of tensors over `link`. Enter when their first message has arrived."""
        meter, began_s = self.incoming[link], time.monotonic()
        meter.begin(began_s)
        arrived = 0
        try:
            yield
            arrived = num_bytes
        finally:
            ended_s = time.monotonic()
            meter.end(arrived, ended_s)
            self.line.received_from(link[0], arrived, ended_s - began_s)

    def hear(self, peer: PeerId) -> None:
        """Note that a message of this peer has just arrived."""
        self.heard_s[peer] = time.monotonic()

    def take(self, peer: PeerId, way: Way) -> None:
        """Note the way of a microbatch to the peer. If the last one took another, what was measured of this one before is forgotten."""
        if self.taken.get(peer, way) is not way:
            self.forget_way(peer, way)
        self.taken[peer] = way

    def told(self, link: Link, rate: float, num_bytes: int = 0) -> None:
        """Take the rate at which the peer says this peer's tensors arrive over `link`; 0 where it does not know yet.

        `num_bytes`: the size of the tensors that were sent last; a rate that was told of none says nothing of this peer's line.
        """
        if math.isfinite(rate) and rate > 0:
            self.outgoing[link] = rate
            self.line.told(link[0], rate, num_bytes)

    def rates(self, peer: PeerId, way: Way | None = None) -> tuple[float | None, float | None]:
        """Return bytes per second to and from the peer by `way`, by default that of the last microbatch; None where unknown."""
        link = peer, way or self.taken.get(peer, Way.TUNNEL)
        meter = self.incoming.get(link)
        return self.outgoing.get(link), meter.rate if meter is not None else None

    def forget(self, peer: PeerId) -> None:
        self.taken.pop(peer, None)
        self.heard_s.pop(peer, None)
        self.line.forget(peer)
        for way in Way:
            self.forget_way(peer, way)

    def forget_way(self, peer: PeerId, way: Way) -> None:
        self.outgoing.pop((peer, way), None)
        self.incoming.pop((peer, way), None)
