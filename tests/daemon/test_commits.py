"""How long steps take is known although the wall clock is set."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from peerd.daemon import commits
from peerd.daemon.answers import Answers
from peerd.daemon.commits import Commits
from peerd.daemon.departure import Departure
from peerd.daemon.peer import Peer
from tests.tiny_run import tiny_manifest


@pytest.mark.parametrize("by_s", [-86400.0, 86400.0])
def test_a_clock_that_is_set_changes_neither_the_speed_nor_how_long_a_drain_may_stand_still(
    by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, off_s = Commits(), 0.0
    monkeypatch.setattr(commits, "time", SimpleNamespace(time=lambda: time.time() + off_s, monotonic=time.monotonic))
    for step in range(3):
        made.note(step)
        off_s = by_s
        time.sleep(0.01)
    seat = SimpleNamespace(commits=made, served_s=600.0)
    peer = cast(Peer, SimpleNamespace(seat=seat, place=SimpleNamespace(manifest=tiny_manifest()), is_resting=False))
    assert 0.01 <= Departure(peer)._step_time_s() < 5.0
    speed = Answers.tokens_per_second(cast(Answers, SimpleNamespace(_peer=peer)))
    assert 1.0 < speed <= tiny_manifest().tokens_per_step / 0.01
