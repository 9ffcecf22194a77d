"""Leaving: what a peer holds is finished and averaged first, so that nobody has to do it again; asked twice, it goes at once."""

from __future__ import annotations

import json
import signal
from datetime import datetime

import pytest

from peerd.errors import ExitCode
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PACE_MS = 40


@pytest.mark.slow
def test_after_a_graceful_leave_nothing_has_to_be_done_again() -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        stays, by_verb, by_term = (swarm.join(1, compute_stand_in_ms=PACE_MS) for _ in range(3))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()

        by_verb.wait_until_mid_step(1)
        left = run_peerd(swarm.environment, "leave", "--home", by_verb.home.folder)
        assert (left.returncode, left.stderr) == (0, "")
        assert by_verb.exit_code() == ExitCode.OK
        assert_nothing_was_done_again(swarm, first)

        by_term.wait_until_mid_step(2)
        by_term.signal(signal.SIGTERM)
        assert by_term.exit_code() == ExitCode.OK
        assert_nothing_was_done_again(swarm, first)
        assert stays.status["peer"]["step"] >= 3


def assert_nothing_was_done_again(swarm: Swarm, first: Daemon) -> None:
    """Also over the next two steps. A round that opens while somebody goes may close and open anew: that costs no work."""
    first.wait_for_step(first.status["peer"]["step"] + 2)
    for name in ("replayed_microbatches", "ledger_resets"):
        assert {name: swarm.total(name)} == {name: 0}
    swarm.assert_exact()


def test_a_second_signal_leaves_without_finishing_what_is_queued() -> None:
    """Two microbatches of 90 s each are queued when it is asked, and it waits for neither: not for the pass under way either."""
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        slow = swarm.start(compute_stand_in_ms=90_000)
        slow.wait_until_serving()
        until(lambda: slow.status["peer"]["queue"] >= 2)
        slow.signal(signal.SIGINT)
        until(lambda: logged_at_s(slow, "leaving"))
        slow.signal(signal.SIGINT)
        assert slow.exit_code(timeout_s=15) == ExitCode.OK
        assert logged_at_s(slow, "left") - logged_at_s(slow, "leaving") < 4


def logged_at_s(daemon: Daemon, event: str) -> float:
    """When its log tells of an event; 0 when it does not."""
    found = [json.loads(line) for line in daemon.log.splitlines() if f'"event": "{event}"' in line]
    return datetime.fromisoformat(found[-1]["timestamp"]).timestamp() if found else 0.0
