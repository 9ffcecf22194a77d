"""One row of docs/faults.md each: a real daemon ends or stops at a named point, and the swarm goes on exactly.

All rows share one swarm of two stages with a survivor in each; every row brings a victim of its own. In the end the
model must be the one that a single machine would have trained.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from peerd.daemon.faults import Point
from peerd.errors import ExitCode
from peerd.policy.hashing import turn_of
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(240)]

PACE_MS = 20
GONE_FOR_S = 4.0
"""Longer than a record lives: the others have gone on without it."""
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """A survivor in each stage; both launch microbatches."""
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        swarm.start(stage=0, compute_stand_in_ms=PACE_MS, allow_faults=True)
        swarm.join(1, compute_stand_in_ms=PACE_MS, allow_faults=True)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        yield swarm


@pytest.fixture(autouse=True)
def no_victim_is_left(swarm: Swarm) -> Iterator[None]:
    """However a row ends, the next begins with the survivors alone."""
    yield
    for daemon in swarm.living:
        if daemon not in survivors(swarm):
            daemon.kill()
        else:
            daemon.signal(signal.SIGCONT)


def victim_of(swarm: Swarm, stage: int) -> Daemon:
    """One more peer, without the data, so that all launches and repairs are the survivors'."""
    victim = swarm.join(stage, data="", compute_stand_in_ms=PACE_MS, allow_faults=True)
    victim.wait_until_serving(60)
    return victim


def survivors(swarm: Swarm) -> list[Daemon]:
    return swarm.daemons[:2]


def total(swarm: Swarm, name: str) -> int:
    return sum(int(daemon.counters[name]) for daemon in survivors(swarm))  # type: ignore[literal-required, misc]


def order(daemon: Daemon, kind: str, **how: object) -> None:
    daemon.request("fault", kind=kind, **how)


def assert_it_goes_on(swarm: Swarm, steps: int = 2) -> None:
    """Two steps more, and every step so far exact."""
    goal = max(daemon.status["peer"]["step"] for daemon in survivors(swarm)) + steps
    for daemon in survivors(swarm):
        daemon.wait_for_step(goal)
    for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps", "internal_errors"):
        assert {name: total(swarm, name)} == {name: 0}


def stands_still(daemon: Daemon) -> bool:
    return psutil.Process(daemon.process.pid).status() == psutil.STATUS_STOPPED


def test_a_daemon_refuses_to_be_harmed_unless_it_was_started_for_that(swarm: Swarm) -> None:
    harmless = swarm.join(0)
    with pytest.raises(Exception, match="not a request"):
        order(harmless, "slow", factor=2, for_s=1)
    with pytest.raises(Exception, match="a fault is"):
        order(survivors(swarm)[0], "kill", at="noon")


@pytest.mark.parametrize(
    ("point", "stage"),
    [
        pytest.param(Point.QUEUED, 0, marks=slow),
        pytest.param(Point.QUEUED, 1, marks=slow),
        pytest.param(Point.FORWARD, 0, marks=slow),
        (Point.WAITING, 0),
        pytest.param(Point.BACKWARD, 0, marks=slow),
        pytest.param(Point.BACKWARD, 1, marks=slow),
    ],
)
def test_who_dies_with_a_microbatch_in_hand_has_it_done_again_elsewhere(swarm: Swarm, point: Point, stage: int) -> None:
    victim = victim_of(swarm, stage)
    before = total(swarm, "replayed_microbatches")
    order(victim, "kill", at=point)
    assert victim.exit_code(60) == -signal.SIGKILL
    assert_it_goes_on(swarm)
    heard = point is not Point.QUEUED  # who dies before its caller hears that it took the call has done nothing in vain
    assert total(swarm, "replayed_microbatches") >= before + heard


@pytest.mark.parametrize(
    ("point", "stage"),
    [
        pytest.param(Point.REPLY, 0, marks=slow),
        pytest.param(Point.REPLY, 1, marks=slow),
        pytest.param(Point.OPENED, 1, marks=slow),
        (Point.SENDER, 1),
        pytest.param(Point.SENDER, 0, marks=slow),
        pytest.param(Point.REDUCER, 1, marks=slow),
        pytest.param(Point.REDUCER, 0, marks=slow),
    ],
)
def test_who_dies_before_the_average_is_whole_has_its_ledger_done_again(swarm: Swarm, point: Point, stage: int) -> None:
    victim = victim_of(swarm, stage)
    before = {name: total(swarm, name) for name in ("replayed_microbatches", "rounds_failed")}
    victim.wait_until_mid_step(0)
    order(victim, "kill", at=point)
    assert victim.exit_code(60) == -signal.SIGKILL
    assert_it_goes_on(swarm)
    assert total(swarm, "replayed_microbatches") > before["replayed_microbatches"]
    if point is not Point.REPLY:
        assert total(swarm, "rounds_failed") > before["rounds_failed"]


@pytest.mark.parametrize(
    ("point", "stage"),
    [
        pytest.param(Point.AVERAGED, 1, marks=slow),
        pytest.param(Point.AVERAGED, 0, marks=slow),
        (Point.COMMIT, 0),
        pytest.param(Point.COMMIT, 1, marks=slow),
        pytest.param(Point.COMMITTED, 0, marks=slow),
        pytest.param(Point.COMMITTED, 1, marks=slow),
    ],
)
def test_who_dies_with_the_average_takes_nothing_along(swarm: Swarm, point: Point, stage: int) -> None:
    victim = victim_of(swarm, stage)
    order(victim, "kill", at=point)
    assert victim.exit_code(60) == -signal.SIGKILL
    assert_it_goes_on(swarm)


def test_a_donor_that_dies_is_replaced_by_another(swarm: Swarm) -> None:
    """The joiner is one whose turn with the victim comes before that with the survivor."""
    survivor, victim = PeerId(survivors(swarm)[1].ready.peer), victim_of(swarm, 1)
    order(victim, "kill", at=Point.DONOR)
    for _ in range(4):  # for once the survivor may be a step ahead, and then it is asked
        home = swarm.new_home()
        home.folder.mkdir(parents=True)
        while turn_of(asks := Identity.load_or_create(home.identity).peer, survivor) < turn_of(asks, PeerId(victim.ready.peer)):
            home.identity.unlink()
        joiner = swarm.join(1, data="")
        assert joiner.home == home
        joiner.wait_until_serving(60)
        if victim.process.poll() is not None:
            break
        joiner.kill()
    assert victim.exit_code() == -signal.SIGKILL
    assert_it_goes_on(swarm)


@slow
def test_a_joiner_that_dies_in_its_download_is_missed_by_nobody(swarm: Swarm) -> None:
    donor = survivors(swarm)[1]
    order(donor, "stop", at=Point.DONOR)
    joiner = swarm.join(1, data="", allow_faults=True)
    assert joiner.ready.peer
    until(lambda: stands_still(donor))
    order(joiner, "kill", at=Point.JOINER)
    assert joiner.status["peer"]["phase"] == "joining"
    donor.signal(signal.SIGCONT)
    assert joiner.exit_code(60) == -signal.SIGKILL
    assert_it_goes_on(swarm)


@pytest.mark.parametrize("point", [pytest.param(point, marks=() if point is Point.WAITING else slow) for point in Point])
def test_who_stops_and_wakes_up_finds_its_way_back(swarm: Swarm, point: Point) -> None:
    """A zombie: the others have gone on, and what it believes is old."""
    if point in (Point.DONOR, Point.JOINER):
        pytest.skip("tried above")
    victim = victim_of(swarm, 0)
    order(victim, "stop", at=point)
    until(lambda: stands_still(victim), 60)
    began_s = time.monotonic()
    assert_it_goes_on(swarm)
    time.sleep(max(0.0, GONE_FOR_S - (time.monotonic() - began_s)))
    victim.signal(signal.SIGCONT)
    victim.wait_for_step(survivors(swarm)[0].status["peer"]["step"])
    assert_it_goes_on(swarm)


@slow
@pytest.mark.parametrize("point", [Point.FORWARD, Point.WAITING, Point.REPLY, Point.OPENED, Point.SENDER, Point.REDUCER, Point.AVERAGED])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_bug_shows_at_once_and_the_run_goes_on_with_the_peer_that_has_it(swarm: Swarm, point: Point, stage: int) -> None:
    if (point, stage) == (Point.WAITING, 1):
        pytest.skip("the last stage sends nothing on")
    victim = victim_of(swarm, stage)
    order(victim, "bug", at=point)
    until(lambda: victim.counters["internal_errors"])
    assert "internal-errors" in {item["code"] for item in victim.status["health"]}
    assert f"TypeError: a bug at {point}, as ordered" in victim.log
    assert "Traceback" in victim.log
    assert_it_goes_on(swarm)
    victim.wait_for_step(survivors(swarm)[0].status["peer"]["step"])
    assert victim.counters["internal_errors"] == 1


@slow
@pytest.mark.parametrize("stage", [0, 1])
def test_hole_21_proposals_whose_calls_end_while_a_peer_joins_leave_no_round_behind(swarm: Swarm, stage: int) -> None:
    victim = victim_of(swarm, stage)
    before = total(swarm, "rounds_failed")
    order(victim, "proposal-cancel", for_s=60, seed=stage)
    until(lambda: total(swarm, "rounds_failed") > before, 60)
    assert_it_goes_on(swarm, steps=4)
    order(victim, "proposal-cancel", for_s=0)
    victim.wait_for_step(survivors(swarm)[0].status["peer"]["step"])


@slow
@pytest.mark.parametrize("point", [Point.COMMIT, Point.COMMITTED])
def test_a_bug_in_an_update_ends_the_daemon_and_the_run_goes_on(swarm: Swarm, point: Point) -> None:
    victim = victim_of(swarm, 1)
    order(victim, "bug", at=point)
    assert victim.exit_code(60) == ExitCode.FAILURE
    assert f"TypeError: a bug at {point}, as ordered" in victim.log
    assert_it_goes_on(swarm)


@slow
def test_a_slow_peer_gets_less_to_do_and_is_itself_again_afterwards(swarm: Swarm) -> None:
    victim, mate = victim_of(swarm, 1), survivors(swarm)[1]
    order(victim, "slow", factor=8, for_s=6)
    assert victim.status["slow_factor"] == 8
    before = [daemon.counters["accumulated_microbatches"] for daemon in (victim, mate)]
    assert_it_goes_on(swarm)
    slows, mates = (daemon.counters["accumulated_microbatches"] - count for daemon, count in zip((victim, mate), before, strict=True))
    assert slows < mates
    until(lambda: victim.status["slow_factor"] == 1)


@slow
def test_a_peer_whose_links_are_dead_is_done_without_and_comes_back(swarm: Swarm) -> None:
    victim = victim_of(swarm, 0)
    (keeper,) = psutil.Process(victim.process.pid).children()
    (p2pd,) = keeper.children()
    os.kill(p2pd.pid, signal.SIGSTOP)
    time.sleep(GONE_FOR_S)
    assert_it_goes_on(swarm)
    os.kill(p2pd.pid, signal.SIGCONT)
    victim.wait_for_step(survivors(swarm)[0].status["peer"]["step"])
    assert_it_goes_on(swarm)


@slow
def test_a_peer_that_hears_nobody_any_more_takes_a_new_p2pd_once_and_goes_on_when_the_others_are_back(swarm: Swarm) -> None:
    lonely, mate = survivors(swarm)
    processes = [psutil.Process(daemon.process.pid) for daemon in (mate, victim_of(swarm, 0))]
    stopped = [each for process in processes for each in (process, *process.children(recursive=True))]
    before = lonely.log.count("it reaches nobody")
    for process in stopped:
        process.suspend()
    try:
        until(lambda: lonely.log.count("it reaches nobody") == before + 1, timeout_s=60)
        until(lambda: {"p2pd-restarted", "cut-off"} <= {item["code"] for item in lonely.status["health"]})
        assert "stage-empty" not in {item["code"] for item in lonely.status["health"]}
    finally:
        for process in stopped:
            process.resume()
    assert_it_goes_on(swarm)
    assert lonely.log.count("it reaches nobody") == before + 1


def test_broken_messages_are_refused_and_change_nothing(swarm: Swarm) -> None:
    victim = victim_of(swarm, 0)
    before = total(swarm, "messages_refused")
    order(victim, "corrupt", for_s=3, seed=1)
    until(lambda: total(swarm, "messages_refused") > before)
    assert_it_goes_on(swarm)
    until(lambda: victim.status["peer"]["phase"] != "joining")
    assert_it_goes_on(swarm)


def test_after_all_of_this_the_model_is_the_one_of_a_single_machine(swarm: Swarm) -> None:
    exported = swarm.export(survivors(swarm)[0])
    steps = len((exported / "history.jsonl").read_text().splitlines())
    assert steps > 2
    assert_equals_reference(exported, swarm.manifest, steps, swarm.folder / "cache" / "peerd")
