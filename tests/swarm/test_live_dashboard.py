"""The dashboard in a browser, with real daemons behind it: it shows who is suspect and who is gone, and outlives its daemon."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from peerd.peer_names import short_id
from peerd.table.view import TTL_PERIODS
from tests.observe.browser import opened, wait_until_live
from tests.swarm.daemons import Daemon, Swarm
from tests.swarm.machine import slowdown
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(600)]

PACE_MS = 40
PERIOD_S = 3.0
"""A record that outlives its peer by nine seconds: on a busy machine, too, somebody notices before it expires."""


def mark_of(daemon: Daemon) -> str:
    return f"[data-peer='{daemon.ready.peer}']"


async def open_dashboard(page: Any, daemon: Daemon) -> None:
    await page.goto((await asyncio.to_thread(daemon.request, "dashboard"))["address"])
    await wait_until_live(page)


async def test_it_shows_a_killed_peer_as_suspect_at_once_and_then_as_gone() -> None:
    tiny = swarm_manifest(num_stages=2)
    with Swarm(replace(tiny, swarm=replace(tiny.swarm, announce_period_s=PERIOD_S))) as swarm:
        first = swarm.start(stage=0, dashboard=True, compute_stand_in_ms=PACE_MS)
        second, victim = (swarm.join(1, compute_stand_in_ms=PACE_MS) for _ in range(2))
        for daemon in swarm.daemons:
            await asyncio.to_thread(daemon.wait_until_serving, 120.0)
        async with opened() as page:
            await open_dashboard(page, first)
            for daemon in (first, second, victim):
                await page.wait_for_selector(mark_of(daemon))
            shown = await page.inner_text("#step")
            await page.wait_for_selector(f"#step:not(:text-is('{shown}'))")

            slow = slowdown()
            victim.kill()
            began_s = time.monotonic()
            await page.wait_for_selector(f"{mark_of(victim)}[data-phase=suspect]")
            suspect_s = time.monotonic() - began_s
            await page.wait_for_selector(mark_of(victim), state="detached")
            gone_s = time.monotonic() - began_s

            slow = max(slow, slowdown())
            assert suspect_s < 2 * slow
            assert gone_s < (TTL_PERIODS * PERIOD_S + 2) * slow
            await page.wait_for_selector(f"#events >> text=Peer {short_id(victim.ready.peer)} is gone")


async def test_a_page_that_is_open_goes_on_with_the_next_daemon_and_shows_the_past() -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        first = swarm.start(dashboard=True, ephemeral=False, compute_stand_in_ms=PACE_MS)
        await asyncio.to_thread(first.wait_for_step, 5)
        async with opened() as page:
            await open_dashboard(page, first)
            await page.wait_for_selector("#leave:visible")
            await asyncio.to_thread(first.wait_for_step, first.status["peer"]["step"] + 2)
            first.kill()
            await page.wait_for_selector("#connection[data-state=lost]")

            again = swarm.spawn_with(replace(first.settings, ephemeral=True))
            await asyncio.to_thread(again.wait_for_step, 1)
            await wait_until_live(page)
            await page.locator("#events >> text=This machine began to serve stage 0").nth(1).wait_for()
            assert len(again.history) >= 5
