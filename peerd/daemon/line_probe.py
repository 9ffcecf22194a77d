"""Measures this machine's line with a few megabytes to and from other peers, before tensors do."""

from __future__ import annotations

from collections.abc import Sequence

from peerd.errors import RemoteError
from peerd.link.line import LineRates
from peerd.link.links import Links
from peerd.table.record import PeerId, RunId
from peerd.wire.checkup import MAX_PROBE_BYTES, CheckupClient

MAX_ASKED = 4
FIRST_PROBE_BYTES = 256 * 1024
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
    for num_bytes in (FIRST_PROBE_BYTES, MAX_PROBE_BYTES):
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
