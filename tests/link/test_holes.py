"""How many connections through routers one peer has here, without the package that makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from peerd.link.punching import MOST_LINES, Holes, Whereabouts
from peerd.link.streams import Stream
from peerd.policy.route.holes import QuicCounts
from peerd.table.record import PeerId


class Connection:
    """A connection over which nothing comes."""

    address, carried = "192.0.2.1:9", QuicCounts(0, 0)

    def __init__(self, node: bytes) -> None:
        self.node = node
        self._ended = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return not self._ended.is_set()

    async def streams(self) -> AsyncIterator[Stream]:
        await self._ended.wait()
        if self.is_open:
            yield cast(Any, None)

    async def closed(self) -> None:
        await self._ended.wait()

    def close(self) -> None:
        self._ended.set()


async def test_a_peer_that_dials_again_and_again_has_few_connections(tmp_path: Path) -> None:
    """Each may carry 32 streams, and each of those takes two open files of this process."""
    around = Whereabouts(mirrors=lambda: (), hosts=lambda: (), tls=lambda: ("127.0.0.1", 0))
    holes = Holes(cast(Any, None), tmp_path, "127.0.0.1", 0, around)
    keys = {PeerId("honest"): b"h" * 32, PeerId("liar"): b"l" * 32}
    for peer, key in keys.items():
        holes._expect(key, peer)
    made = [Connection(keys[PeerId("honest")]), *(Connection(keys[PeerId("liar")]) for _ in range(20))]
    taking = []
    for each in made:
        taking.append(asyncio.ensure_future(holes._take(cast(Any, each))))
        await asyncio.sleep(0)
    assert [each.is_open for each in made] == [True, *(20 - MOST_LINES) * [False], *MOST_LINES * [True]]
    assert holes.line(PeerId("honest")) is not None
    holes.cut_all()
    await asyncio.gather(*taking)
    assert holes.num_lines == 0
