"""Waiting for a swarm of daemons to be done with a run's steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from peerd.cli.demo_daemons import DemoSwarm
from peerd.errors import TimedOutError

POLL_S = 1.0
"""A look at every daemon costs them processor time that is not theirs to spend; steps tell themselves when they ended."""
SILENCE_S = 120.0


def nothing() -> None:
    return


def until_done(swarm: DemoSwarm, num_steps: int, after_each_look: Callable[[], None] = nothing) -> None:
    """Returns when all are done and the losses of so many steps are known. PeerdError when a stage dies out or nothing gets done."""
    heard, heard_at = swarm.heard(), time.monotonic()
    while not swarm.finished or len(swarm.steps) < num_steps:
        time.sleep(POLL_S)
        swarm.poll()
        swarm.require_every_stage()
        after_each_look()
        if swarm.heard() != heard:
            heard, heard_at = swarm.heard(), time.monotonic()
        elif time.monotonic() - heard_at > SILENCE_S:
            raise TimedOutError(f"nothing done for {SILENCE_S:.0f} s")
