"""Chunks that can wait leave in turn, and as soon as a round is over."""

from __future__ import annotations

import asyncio

from peerd.link.uplink import Uplink


async def test_while_nothing_is_known_of_a_line_nothing_waits() -> None:
    uplink = Uplink(lambda: None)
    with uplink.exchanging():
        uplink.sends(1 << 40)
        async with asyncio.timeout(5):
            for _ in range(3):
                await uplink.turn(1 << 30)


async def test_what_waits_for_a_round_goes_once_that_is_over_and_who_gives_up_holds_nobody() -> None:
    uplink = Uplink(lambda: 1e6)
    with uplink.exchanging():
        await uplink.turn(100_000_000)  # the next one is due in 1000 s
        first, second = (asyncio.ensure_future(uplink.turn(1)) for _ in range(2))
        await asyncio.wait({first, second}, timeout=0.05)
        assert not first.done()
        first.cancel()
        await asyncio.wait({second}, timeout=0.05)
        assert not second.done()
    async with asyncio.timeout(5):
        await second
