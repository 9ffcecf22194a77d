"""p2pd is asked whether it answers, and given longer where this process is late itself."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from peerd.link.libp2p import P2P
from peerd.link.p2pd import P2pd
from peerd.link.small_child import SmallChild


class Late:
    """A p2pd that answers after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._client, self._seconds = self, seconds

    async def identify(self) -> None:
        await asyncio.sleep(self._seconds)


async def test_p2pd_that_is_late_as_the_daemon_is_late_does_not_hang() -> None:
    """Where 64 daemons shared two cores, each took its p2pd for one that hangs, and none came back from starting new ones."""

    async def starve() -> None:
        while True:
            time.sleep(0.5)  # noqa: ASYNC251 - what a loop sees that waits for a core
            await asyncio.sleep(0)

    late = P2pd(cast(P2P, Late(1.5)), cast(SmallChild, None))
    assert not await late.answers(0.5)
    starving = asyncio.ensure_future(starve())
    assert await late.answers(0.5)
    starving.cancel()
