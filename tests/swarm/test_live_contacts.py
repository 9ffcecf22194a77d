"""No peer decides alone that another may not join: not one whose clock is wrong, and not one that serves another run by now."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from peerd.errors import PeerdError
from tests.checkup.stub_peer import Faults, stub_peer
from tests.swarm.daemons import Daemon, Swarm
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]

PACE_MS = 50
DAY_S = 86400.0


def outcome(newcomer: Daemon) -> str:
    try:
        newcomer.wait_until_serving()
    except PeerdError as error:
        return f"exit {int(error.exit_code)}: {error}"
    return "serves"


async def test_a_newcomer_joins_whatever_is_wrong_with_one_of_the_peers_that_it_asks() -> None:
    """The clock of one of two peers is a day off. A third one of the run knows neither of them, and its clock is off, too."""
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        alone = swarm.spawn_with(replace(first.settings, home=str(swarm.new_home().folder)), clock_off_s=DAY_S)
        mate = swarm.join(0, compute_stand_in_ms=PACE_MS, allow_faults=True)
        mate.wait_until_serving()
        mate.request("fault", kind="skewed-clock", by_s=-DAY_S, for_s=600.0)
        async with stub_peer(Faults()) as stub:
            contacts = {
                "the clock of its mate is off": swarm.address,
                "it serves another run": f"{stub.partition('#')[0]}#{first.ready.run} {swarm.address}",
                "its clock is off and it is alone": f"{alone.ready.join} {swarm.address}",
            }
            newcomers = {what: swarm.join(0, compute_stand_in_ms=PACE_MS, join=join) for what, join in contacts.items()}
            outcomes = await asyncio.gather(*(asyncio.to_thread(outcome, each) for each in newcomers.values()))
        assert dict(zip(newcomers, outcomes, strict=True)) == dict.fromkeys(newcomers, "serves")
        assert "does not serve run" in newcomers["it serves another run"].log
        assert "24.0 hours behind" in newcomers["its clock is off and it is alone"].log
