"""Measures this machine's line with a few megabytes to and from other peers: before tensors do, and now and then while they do."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from peerd.errors import RemoteError
from peerd.link.line import LineRates
from peerd.link.links import Links
from peerd.policy.round.probing import FIRST_BYTES, more_bytes, told_rate
from peerd.swarm.membership import Membership
from peerd.table.record import HIDDEN, PeerId, RunId
from peerd.wire.checkup import MAX_PROBE_BYTES, CheckupClient

MAX_ASKED = 4
LOOK_S = 1.0
WORTH_MORE = 5e5
"""Bytes per second. A line as fast as this is measured again with more bytes: the first few tell little about it."""


async def probe_line(links: Links, run: RunId, peers: Sequence[PeerId], *, downwards: bool = True) -> LineRates:
    """The rates up and down, each with the first of the peers that takes part."""
    client = CheckupClient(links, run)
    up = down = None
    for peer in peers[:MAX_ASKED]:
        up = up or await _rate(client, peer, upwards=True)
        down = down or (await _rate(client, peer, upwards=False) if downwards else None)
    return LineRates(up, down)


async def _rate(client: CheckupClient, peer: PeerId, *, upwards: bool) -> float | None:
    """Bytes per second; None where the peer does not take part."""
    rate = None
    for num_bytes in (FIRST_BYTES, MAX_PROBE_BYTES):
        try:
            speed = await (client.upload if upwards else client.download)(peer, num_bytes)
        except RemoteError:
            return rate
        if speed.took_s <= 0:
            return rate
        rate = speed.num_bytes / speed.took_s
        if rate < WORTH_MORE:
            break
    return rate


class LineProbes:
    """Measures the uplink again now and then, to one peer or another."""

    def __init__(self, links: Links, membership: Membership) -> None:
        self._links = links
        self._membership = membership
        self._client = CheckupClient(links, membership.run)

    async def run(self) -> None:
        line, uplink = self._links.traffic.line, self._links.traffic.uplink
        probes = line.probes
        while True:
            await asyncio.sleep(LOOK_S)
            if (shown := line.shown) is not None:
                probes.show(shown)
            if not probes.is_due(time.monotonic(), uplink.is_idle) or not (able := self._able()):
                continue
            began_s = time.monotonic()
            try:
                rate = await self._measure(random.choice(able))
            except RemoteError:
                probes.failed(time.monotonic())
            else:
                ended_s = time.monotonic()
                probes.saw(rate, ended_s - began_s, ended_s)

    def _able(self) -> list[PeerId]:
        """Peers that are reached without a relay, whose bytes are rationed."""
        live = self._membership.live()
        return [record.peer for record in live.records if record.peer != live.me and record.reach not in HIDDEN]

    async def _measure(self, peer: PeerId) -> float:
        """Bytes per second; 0: unknown. Raises RemoteError."""
        rate, took_s, own_s = await self._upload(peer, FIRST_BYTES)
        num_bytes = more_bytes(rate, took_s, own_s, MAX_PROBE_BYTES)
        return max(rate, (await self._upload(peer, num_bytes))[0]) if num_bytes else rate

    async def _upload(self, peer: PeerId, num_bytes: int) -> tuple[float, float, float]:
        """The rate, and the time by the other end's clock and by this one's."""
        began_s = time.monotonic()
        speed = await self._client.upload(peer, num_bytes, as_tensors=True)
        own_s = time.monotonic() - began_s
        return told_rate(min(speed.num_bytes, num_bytes), speed.took_s, own_s), speed.took_s, own_s
