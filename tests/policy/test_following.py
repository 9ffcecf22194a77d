"""Averages are kept for a joiner as long as it downloads and catches up, and no longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.step.following import Followers
from peerd.table.record import PeerId, PeerRecord, Phase
from tests.strategies import view_of

JOINER, OTHER, LEAST_S = PeerId("j"), PeerId("k"), 15.0
ME = PeerRecord(peer=PeerId("me"), phase=Phase.ACCUMULATING, step=50)


def joining(step: int = 0, phase: Phase = Phase.JOINING) -> PeerRecord:
    return PeerRecord(peer=JOINER, phase=phase, step=step)


def needed(followers: Followers, now_s: float, *records: PeerRecord) -> int | None:
    return followers.needed_from(view_of(ME, *records), ME, now_s)


@pytest.fixture
def followers() -> Followers:
    """One joiner whose download of step 10 took 100 seconds."""
    followers = Followers()
    followers.began(JOINER, 10, 0.0)
    assert needed(followers, 99.0, joining()) == 10
    followers.ended(JOINER, 100.0, LEAST_S)
    return followers


def test_nothing_is_needed_where_nobody_downloads() -> None:
    assert needed(Followers(), 0.0) is None


def test_a_download_that_goes_on_keeps_its_averages_whatever_the_table_says() -> None:
    followers = Followers()
    followers.began(JOINER, 10, 0.0)
    for record in ((), (joining(),), (joining(3, Phase.ACCUMULATING),)):
        assert needed(followers, 1e6, *record) == 10


def test_after_it_the_joiner_has_as_long_as_the_download_took(followers: Followers) -> None:
    assert needed(followers, 200.0, joining()) == 10
    assert needed(followers, 201.0) is None


def test_a_joiner_that_has_not_asked_yet_will_need_this_steps_average() -> None:
    assert needed(Followers(), 0.0, joining()) == ME.step
    assert needed(Followers(), 0.0, replace(joining(), stage=1)) is None


def test_a_short_download_leaves_at_least_the_given_time() -> None:
    followers = Followers()
    followers.began(JOINER, 10, 0.0)
    followers.ended(JOINER, 0.1, LEAST_S)
    assert needed(followers, 15.0) == 10
    assert needed(followers, 15.2) is None


def test_each_average_that_it_applies_gives_it_that_time_again(followers: Followers) -> None:
    assert needed(followers, 190.0, joining(11)) == 11
    assert needed(followers, 280.0, joining(14)) == 14
    assert needed(followers, 380.0, joining(14)) == 14
    assert needed(followers, 381.0, joining(14)) == ME.step, "from now on: it may ask for the state again"


def test_a_joiner_that_serves_needs_none(followers: Followers) -> None:
    assert needed(followers, 101.0, joining(50, Phase.ACCUMULATING)) is None
    assert needed(followers, 101.0) is None


def test_steps_that_it_cannot_have_from_here_say_nothing(followers: Followers) -> None:
    """Before it has loaded the state, its record tells of another one."""
    for step in (3, 51):
        assert needed(followers, 101.0, joining(step)) == 10


def test_a_joiner_that_asks_again_may_go_on_with_the_state_that_it_had_begun_with(followers: Followers) -> None:
    followers.began(JOINER, 30, 110.0)
    assert needed(followers, 1000.0) == 10
    followers.ended(JOINER, 1000.0, LEAST_S)
    assert needed(followers, 1100.0, joining(30)) == 30, "it has taken the newer one"


def test_the_averages_since_the_oldest_state_are_kept_for_several(followers: Followers) -> None:
    followers.began(OTHER, 7, 100.0)
    assert needed(followers, 101.0, joining()) == 7
    followers.began(OTHER, 12, 102.0)
    followers.ended(OTHER, 103.0, LEAST_S)
    assert needed(followers, 104.0) == 7, "the end of one of its two downloads"
    followers.ended(OTHER, 105.0, LEAST_S)
    assert needed(followers, 121.0, joining()) == 10
    followers.began(OTHER, 12, 122.0)
    assert needed(followers, 1000.0) == 12


def follows(average_s: float, step_s: float, for_s: float) -> list[bool]:
    """Whether the next average is kept, at each look while the joiner of a download of 100 s applies some, and the stage makes steps."""
    followers = Followers()
    followers.began(JOINER, 10, 0.0)
    followers.ended(JOINER, 100.0, LEAST_S)
    found = list[bool]()
    for elapsed_s in range(int(for_s)):
        newest = 10 + int((100.0 + elapsed_s) / step_s)
        record, me = joining(min(newest, 10 + int(elapsed_s / average_s))), replace(ME, step=newest)
        needed_from = followers.needed_from(view_of(me, record), me, 100.0 + elapsed_s)
        found.append(needed_from is not None and needed_from <= record.step)
        if record.step == newest:
            break
    return found


@pytest.mark.parametrize("step_s", [1.0, 7.0, 40.0, 600.0])
def test_a_joiner_that_can_catch_up_has_the_averages_until_it_has(step_s: float) -> None:
    kept = follows(0.9 * step_s, step_s, for_s=5000.0)
    assert all(kept)
    assert len(kept) < 5000


def test_a_joiner_that_falls_behind_is_given_up_however_often_it_moves() -> None:
    kept = follows(12.0, 10.0, for_s=700.0)
    assert 400 <= kept.index(False) <= 420, "four times as long as its download took"
