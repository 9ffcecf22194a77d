"""What measurements mean: thresholds, and that every fault comes with a remedy."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.policy.owner.governor import Limits, Pause
from peerd.policy.round.needs import StageNeed
from peerd.policy.swarm import checkup
from peerd.policy.swarm.checkup import Dialled, Finding, Verdict
from peerd.policy.swarm.clocks import ClockOffset
from peerd.table.record import PeerId

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
sizes = st.integers(0, 1 << 45)
rates = st.none() | st.floats(0, 1e11)
dialled = st.builds(
    Dialled, st.sampled_from("abc").map(PeerId), st.sampled_from(["", "203.0.113.7", "198.51.100.2"]), st.none() | st.booleans()
)


@settings(max_examples=40)
@given(
    sizes,
    st.lists(sizes, max_size=4),
    st.floats(-1e6, 1e6),
    st.floats(0, 100),
    st.lists(dialled, max_size=6),
    rates,
    st.dictionaries(st.sampled_from(["torch", "grpcio"]), st.text(max_size=12)),
    st.builds(Limits, upload=st.floats(0, 1e10), download=st.floats(0, 1e10)),
)
def test_every_fault_has_a_remedy_and_nothing_else_has(
    size: int,
    needed: list[int],
    offset_s: float,
    round_trip_s: float,
    answers: list[Dialled],
    rate: float | None,
    found: dict[str, str],
    limits: Limits,
) -> None:
    dial_back = checkup.of_dial_backs(answers, 4001)
    findings = [
        checkup.of_memory(size, needed),
        checkup.of_memory(size, needed, allowed_bytes=size // 3),
        *checkup.of_limits(limits, None),
        *checkup.of_limits(limits, Pause("its owner paused it", "after `peerd resume`")),
        *(checkup.of_direct(answers, 4001, why) for why in ("", "it is not installed")),
        *(checkup.of_no_direct(why) for why in ("", checkup.CAPPED)),
        checkup.of_disk("/home", size),
        checkup.of_open_files(size),
        checkup.of_clocks([ClockOffset(PeerId("a"), offset_s, round_trip_s)]),
        dial_back,
        *(checkup.of_relay(dial_back, refusals) for refusals in ([], ["full"], ["full", ""])),
        *(checkup.of_daemons_relays(dial_back, is_relayed, "so it is") for is_relayed in (True, False)),
        *checkup.of_speed(rate, rate, limits),
        *checkup.of_line(rate, rate, limits, [need(each / 1e6) for each in needed]),
        *checkup.of_versions(found, {"torch": "2.6", "grpcio": "1.85.1"}),
    ]
    for finding in findings:
        assert bool(finding.remedy) == (finding.verdict is not OK)
        assert finding.title


@pytest.mark.parametrize(
    ("limit", "num_peers", "verdict"),
    [(1024, 60, OK), (1024, 61, PROBLEM), (4063, 249, OK), (4063, 250, PROBLEM), (1023, 1, WARNING)],
)
def test_open_files_are_enough_for_so_many_peers_as_is_said(limit: int, num_peers: int, verdict: str) -> None:
    found = checkup.of_open_files(limit, num_peers)
    assert found.verdict == verdict
    enough = int((re.search(r"enough for (\d+) other peers", found.title) or ["", "0"])[1])
    if verdict is PROBLEM:
        assert f"this peer needs {checkup.files_needed(num_peers)} open files for {num_peers} other peers" in found.title
    else:
        assert num_peers <= enough
        assert checkup.files_needed(enough) <= limit < checkup.files_needed(enough + 1)


@pytest.mark.parametrize("num_peers", [250, 300, 1000, 10_000])
def test_a_large_swarm_needs_the_files_of_those_that_a_peer_works_with(num_peers: int) -> None:
    """With 4,096 files a peer was refused from 404 others on, and macOS's 10,240 were too few for 1,018."""
    assert checkup.of_open_files(4096, num_peers).verdict is OK
    assert "any number of other peers" in checkup.of_open_files(4096, num_peers).title
    assert checkup.of_open_files(4063, num_peers).verdict is PROBLEM


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (None, PROBLEM),
        ("2.5.9", PROBLEM),
        ("2.6", OK),
        ("2.6.0+cpu", OK),
        ("2.10.0", OK),
        ("3.0.0rc1", OK),
        ("", PROBLEM),
        ("odd", PROBLEM),
    ],
)
def test_a_library_is_missing_too_old_or_fine(version: str | None, verdict: Verdict) -> None:
    (finding,) = checkup.of_versions({"torch": version} if version is not None else {}, {"torch": "2.6"})
    assert finding.verdict is verdict


def test_memory_is_judged_by_the_run_where_that_is_known() -> None:
    needed = [2_000_000_000, 4_000_000_000]
    assert [checkup.of_memory(free, needed).verdict for free in (10**9, 3 * 10**9, 5 * 10**9)] == [PROBLEM, WARNING, OK]
    assert [checkup.of_memory(free, []).verdict for free in (10**8, 2 * 10**9)] == [WARNING, OK]


def test_memory_that_the_owner_does_not_give_counts_for_nothing() -> None:
    finding = checkup.of_memory(5 * 10**9, [2 * 10**9], allowed_bytes=10**9)
    assert finding.verdict is PROBLEM
    assert "1.0 GB of memory allowed" in finding.title
    assert "peerd limits --memory" in finding.remedy
    assert checkup.of_memory(10**9, [10**8], allowed_bytes=5 * 10**9) == checkup.of_memory(10**9, [10**8])


def test_a_cap_that_starves_others_or_that_the_line_cannot_fill_is_named() -> None:
    starving, generous = Limits(upload=1e5), Limits(upload=50e6 / 8, download=50e6 / 8)
    (finding,) = checkup.of_limits(starving, None)
    assert ("0.8 Mbit/s of upload" in finding.title, "peerd limits --upload 5Mbit" in finding.remedy) == (True, True)
    assert [each.verdict for each in checkup.of_limits(generous, None)] == [OK]
    up, down = checkup.of_speed(20e6, 80e6, generous)
    assert (up.verdict, down.verdict) == (WARNING, OK)
    assert "peerd limits --upload 16Mbit" in up.remedy
    assert [each.verdict for each in checkup.of_speed(20e6, 80e6, Limits())] == [OK, OK]


def need(rounds: float, boundary_up: float = 0.0) -> StageNeed:
    """In Mbit/s."""
    return StageNeed(rounds=rounds * 125_000, boundary_up=boundary_up * 125_000, boundary_down=0.0)


def test_a_line_too_slow_for_the_runs_averages_is_foretold_and_keeps_nobody_out() -> None:
    (finding,) = checkup.of_line(5e6, 100e6, Limits(), [need(24), need(30)])
    assert (finding.verdict, finding.title) == (WARNING, "this run needs 24 Mbit/s up, this machine has 5")
    assert finding.remedy.startswith("it may join and compute, but averages take longer for it")
    (finding,) = checkup.of_line(100e6, 5e6, Limits(), [need(24), need(30)])
    assert finding.title == "this run needs 24 Mbit/s down, this machine has 5"
    (finding,) = checkup.of_line(26e6, None, Limits(), [need(24), need(30)])
    assert (finding.verdict, finding.title) == (WARNING, "a stage of this run needs 30 Mbit/s up, this machine has 26")
    (finding,) = checkup.of_line(100e6, 100e6, Limits(upload=625_000), [need(24)])
    assert finding.title.endswith("this machine has 5")


def test_a_line_that_suffices_is_told_and_whether_it_sets_the_pace() -> None:
    (finding,) = checkup.of_line(100e6, 100e6, Limits(), [need(24), need(30)])
    assert (finding.verdict, finding.title) == (OK, "this run needs 30 Mbit/s up, this machine has 100")
    (finding,) = checkup.of_line(100e6, 100e6, Limits(), [need(24, boundary_up=160)])
    assert finding.title.endswith("at its peers' pace microbatches take 160 Mbit/s, so it gets fewer of them")


def test_nothing_is_foretold_of_a_line_that_was_not_measured_or_a_run_that_has_computed_nothing() -> None:
    assert checkup.of_line(None, None, Limits(), [need(24)]) == checkup.of_line(5e6, 5e6, Limits(), [need(0)]) == []
    assert checkup.of_line(5e6, 5e6, Limits(), []) == []


def test_direct_connections_that_do_not_get_through_are_never_a_problem() -> None:
    a, b = PeerId("a"), PeerId("b")
    verdicts = [
        checkup.of_direct(answers, 4002, "it is not installed").verdict
        for answers in ([Dialled(a, "1.2.3.4", False)], [Dialled(a, "", None)], [Dialled(a, "1.2.3.4", True), Dialled(b, "1.2.3.4", False)])
    ]
    assert verdicts == [WARNING, WARNING, WARNING]
    assert checkup.of_direct([Dialled(a, "1.2.3.4", True), Dialled(b, "", None)], 4002, "").verdict is OK


@pytest.mark.parametrize(
    ("offset_s", "round_trip_s", "verdict"),
    [(0.0, 0.1, OK), (0.9, 0.0, OK), (-2.0, 0.0, WARNING), (3.1, 0.0, PROBLEM), (3.1, 0.4, WARNING), (-60.0, 2.0, PROBLEM)],
)
def test_a_clock_is_judged_within_what_the_round_trip_leaves_open(offset_s: float, round_trip_s: float, verdict: Verdict) -> None:
    offset = ClockOffset(PeerId("a"), offset_s, round_trip_s)
    assert checkup.of_clocks([offset]).verdict is verdict
    assert (verdict is PROBLEM) == offset.is_off
    agreeing = [ClockOffset(PeerId(name), 0.0, 0.1) for name in "bc"]
    assert checkup.of_clocks([offset, *agreeing]).verdict is (WARNING if verdict is PROBLEM else verdict), "the others are right"


def of_answers(*answers: tuple[str, bool | None]) -> Finding:
    return checkup.of_dial_backs([Dialled(PeerId(str(number)), *answer) for number, answer in enumerate(answers)], 4001)


def test_being_reached_is_what_those_say_who_say_anything() -> None:
    here, there = "203.0.113.7", "198.51.100.2"
    assert of_answers().verdict is WARNING
    assert of_answers(("", None), ("", None)).verdict is WARNING
    assert of_answers((here, True), ("", None)).verdict is OK
    assert of_answers((here, True), (here, False)).verdict is WARNING
    assert of_answers((here, False), (here, False)).verdict is PROBLEM
    assert of_answers((here, True), (there, True)).verdict is WARNING
    assert "1 of 2 peers reached port 4001 at 203.0.113.7" in of_answers((here, True), (here, False)).title
    assert of_answers((here, True)).title.endswith("at 203.0.113.7 from outside")


def test_peers_on_the_same_machine_do_not_say_what_is_seen_from_outside() -> None:
    for reached in (True, False):
        assert of_answers(("127.0.0.1", reached)).title.endswith("port 4001 at 127.0.0.1 on this machine")


@given(st.lists(st.sampled_from(list(Verdict)), max_size=5))
def test_the_worst_verdict_is_the_whole_checkups(verdicts: list[Verdict]) -> None:
    found = checkup.worst([Finding("x", verdict, "x", "y") for verdict in verdicts])
    assert found is (PROBLEM if PROBLEM in verdicts else WARNING if WARNING in verdicts else OK)


def test_that_nobody_can_dial_a_machine_is_no_problem_where_a_relay_takes_it() -> None:
    shut = checkup.of_dial_backs([Dialled(PeerId("a"), "1.2.3.4", False)], 4001)
    taken, refused, alone = (checkup.of_relay(shut, refusals) for refusals in (["full", ""], ["full"], []))
    assert [each.verdict for each in (shut, taken, refused, alone)] == [PROBLEM, OK, WARNING, WARNING]
    assert "1 of 2 relays" in taken.title
    assert "full" in refused.title
    assert "--relay" in alone.remedy
    assert checkup.with_relay(shut, taken).verdict is WARNING
    assert checkup.with_relay(shut, refused) == checkup.with_relay(shut, alone) == shut
    open_ = checkup.of_dial_backs([Dialled(PeerId("a"), "1.2.3.4", True)], 4001)
    assert checkup.with_relay(open_, checkup.of_relay(open_, [])) == open_


def test_a_checkup_repeats_what_a_running_daemon_finds_wrong_with_its_machine() -> None:
    full = {"code": "disk", "title": "cannot write history", "severity": "problem", "remedy": "free some space"}
    empty = {"code": "stage-empty", "title": "nobody serves stage 1", "severity": "problem", "remedy": "more peers have to join"}
    assert checkup.of_health([full, empty]) == [checkup.problem("disk", "cannot write history", "free some space")]
