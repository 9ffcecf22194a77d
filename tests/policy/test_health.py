"""Named states: each appears when it is so, says why, and goes away by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.errors import DiskError, LimitError
from peerd.policy.swarm.health import (
    FIRST_PROGRESS_S,
    STALLED_AFTER_S,
    Facts,
    HealthNote,
    advance,
    health,
    open_files,
    resumed,
    unwritten_files,
)
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, live_views, member, view_of

ME = member("me", step=5, trains=True)


BOTH = view_of(ME, member("a", stage=1, step=5))
LIFETIME_S = 15.0


def facts_of(*records: PeerRecord, still_s: float = 0.0, gap_s: float = 0.1, step_s: float = 0.0, **more: Any) -> Facts:
    """A run in which every stage had a peer, and then what is true of `records` was so for `still_s`."""
    before = replace(advance(None, BOTH, 2, NUM_MICROBATCHES, 0.0), gap_s=gap_s, step_s=step_s)
    return Facts(
        mine=records[0],
        live=view_of(*records),
        num_stages=2,
        num_microbatches=NUM_MICROBATCHES,
        decision="2 of 6 microbatches done",
        progress=replace(advance(before, view_of(*records), 2, NUM_MICROBATCHES, 0.0), since_s=0.0),
        now_s=still_s,
        lifetime_s=LIFETIME_S,
        **more,
    )


def codes(facts: Facts) -> list[str]:
    return [item.code for item in health(facts)]


def stalled(facts: Facts) -> HealthNote:
    return next(item for item in health(facts) if item.code == "stalled")


def test_a_run_that_goes_on_has_nothing_to_tell() -> None:
    assert health(facts_of(ME, member("a", stage=1, step=5))) == []


def test_unlike_devices_of_a_stage_are_named_where_the_run_lets_them_drift() -> None:
    mine, mate, other = (
        replace(ME, device="CPU"),
        replace(member("b", step=5), device="RTX 3060"),
        replace(member("a", stage=1, step=5), device="M1"),
    )
    assert codes(facts_of(mine, mate, other, lets_drift=True)) == ["unlike-devices"]
    assert "CPU, RTX 3060" in health(facts_of(mine, mate, other, lets_drift=True))[0].title
    assert codes(facts_of(mine, mate, other)) == []
    assert codes(facts_of(mine, replace(mate, device=""), other, lets_drift=True)) == []
    assert codes(facts_of(mine, replace(mate, device="CPU"), other, lets_drift=True)) == []


def test_an_empty_stage_is_named_and_is_not_called_a_stall_too() -> None:
    facts = facts_of(ME, still_s=1e6)
    assert codes(facts) == ["stage-empty"]
    assert "stage 1" in health(facts)[0].title


def test_a_peer_that_is_about_to_serve_a_stage_from_its_disk_does_not_ask_for_more_peers() -> None:
    mine = replace(ME, phase=Phase.JOINING, trains=True, checkpoints=(4, 5))
    other = member("a", stage=1, step=5)
    assert codes(facts_of(mine, other, still_s=1e6)) == ["joining"]
    assert codes(facts_of(replace(mine, checkpoints=()), other, still_s=1e6)) == ["stage-empty", "joining"]
    (note, _) = health(facts_of(mine, still_s=1e6))
    assert note.title == "nobody serves stage 1"


def test_a_run_that_has_diverged_says_at_which_step_and_is_not_called_a_stall_too() -> None:
    facts = facts_of(replace(ME, diverged_at=5), member("a", stage=1, step=5), still_s=1e6)
    assert codes(facts) == ["diverged"]
    assert "at step 5" in health(facts)[0].title
    assert codes(facts_of(replace(ME, diverged_at=5), member("a", stage=1, step=6), still_s=0.0)) == ["diverged"]


def test_a_run_without_data_says_so() -> None:
    assert codes(facts_of(replace(ME, trains=False), member("a", stage=1, step=5), still_s=20.0)) == ["no-trainer"]


def test_nobody_is_missed_that_may_be_back_at_once() -> None:
    """A peer that restarts or is suspected wrongly is away for less than a record's life."""
    for records in ((ME,), (replace(ME, trains=False), member("a", stage=1, step=5))):
        assert codes(facts_of(*records, still_s=LIFETIME_S - 1)) == []
        assert len(codes(facts_of(*records, still_s=LIFETIME_S))) == 1


def test_what_was_never_there_is_missed_at_once() -> None:
    facts = facts_of(ME)
    assert codes(replace(facts, progress=advance(None, facts.live, 2, NUM_MICROBATCHES, 0.0))) == ["stage-empty"]


def test_a_peer_that_reaches_nobody_says_so_and_not_that_others_lack_peers() -> None:
    alone = replace(ME, trains=False)
    assert codes(facts_of(alone, still_s=20.0, has_met_others=True)) == ["cut-off"]
    assert codes(facts_of(alone, still_s=10.0, has_met_others=True)) == []
    assert codes(facts_of(alone, still_s=20.0)) == ["stage-empty", "no-trainer"], "the others have left"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (member("a", stage=1, step=5, done=0b11), "stage 0 lacks 6 of 6 microbatches of step 5"),
        (member("a", stage=1, step=4, done=0b11), "stage 1 lacks 4 of 6 microbatches of step 4"),
        (member("a", stage=1, step=4, done=FULL), "stage 1 has not averaged step 4"),
        (member("a", stage=1, step=4, phase=Phase.AVERAGED, average_id=AverageId(b"x")), "stage 1 has not averaged step 4"),
    ],
)
def test_a_stall_names_the_stage_that_is_behind_and_what_it_lacks(other: PeerRecord, reason: str) -> None:
    facts = facts_of(ME, other, still_s=STALLED_AFTER_S + 10)
    assert reason in stalled(facts).title
    assert "2 of 6 microbatches done" in stalled(facts).title
    assert stalled(facts).severity == "problem"


def test_a_stall_is_called_one_only_after_long_for_this_run_and_never_at_its_end() -> None:
    other = member("a", stage=1, step=5)
    assert codes(facts_of(ME, other, still_s=STALLED_AFTER_S - 1)) == []
    assert codes(facts_of(ME, other, still_s=170.0, gap_s=60.0)) == []
    assert codes(facts_of(ME, other, still_s=190.0, gap_s=60.0)) == ["stalled"]
    assert codes(facts_of(ME, other, still_s=190.0, gap_s=60.0, step_s=600.0)) == [], "its averaging takes longer than a microbatch"
    assert codes(facts_of(ME, other, still_s=FIRST_PROGRESS_S - 1, gap_s=0.0)) == [], "what a microbatch takes is not known"
    assert codes(facts_of(ME, other, still_s=FIRST_PROGRESS_S, gap_s=0.0)) == ["stalled"]
    assert facts_of(ME, gap_s=0.0).progress.patience_s(8) == 1200.0, "it passes eight stages, forward and back, at a minute or more each"
    assert codes(facts_of(ME, other, still_s=1e6, complete=True)) == ["complete"]


def test_a_run_that_is_complete_thanks_and_says_how_to_get_the_model() -> None:
    facts = facts_of(replace(ME, step=30), member("a", stage=1, step=30), complete=True)
    (note,) = health(replace(facts, computed=1234))
    assert note.title == "the run is complete after 30 steps. Thank you; this peer has computed 1,234 microbatches since it started"
    assert "1 microbatch since" in health(replace(facts, computed=1))[0].title
    assert (note.severity, "peerd export" in note.remedy) == ("info", True)
    (looked_on,) = health(facts)
    assert looked_on.title.endswith("Thank you")


def test_a_peer_that_comes_back_misses_nobody_before_a_record_has_had_time_to_arrive() -> None:
    """Its stage was empty as it went, or it was the only one with the data; what it saw then says nothing of now."""
    gone = replace(ME, phase=Phase.JOINING, trains=False)
    before = advance(advance(None, view_of(ME), 2, NUM_MICROBATCHES, 0.0), view_of(gone), 2, NUM_MICROBATCHES, 10.0)
    back_s = 10.0 + 100 * LIFETIME_S
    for away, told in ((resumed(before, back_s), ["joining"]), (before, ["stage-empty", "no-trainer", "joining"])):
        facts = replace(facts_of(gone), progress=advance(away, view_of(gone), 2, NUM_MICROBATCHES, back_s), now_s=back_s + 1)
        assert codes(facts) == told
    later = replace(facts_of(gone), progress=resumed(before, back_s), now_s=back_s + 1)
    assert later.progress.since_s == back_s, "the time away is no standstill"
    came = advance(resumed(before, back_s), view_of(ME, member("a", stage=1, step=5, done=0b1)), 2, NUM_MICROBATCHES, back_s + 2)
    assert came.gap_s <= 2, "and makes the peer no more patient"


def test_a_run_whose_microbatches_take_minutes_is_not_called_a_stall_while_one_is_computed() -> None:
    """Ten minutes in all stages, and none is done yet; peers tell of it while they compute the first."""
    records = ME, member("a", stage=1, step=5)
    assert codes(facts_of(*records, still_s=1500.0, gap_s=0.0)) == ["stalled"]
    assert codes(facts_of(*records, still_s=1500.0, gap_s=0.0, microbatch_s=600.0)) == []
    assert codes(facts_of(*records, still_s=1500.0, microbatch_s=600.0)) == [], "the one before was of short sequences"
    assert codes(facts_of(*records, still_s=1801.0, microbatch_s=600.0)) == ["stalled"]


def test_a_first_round_over_slow_lines_is_no_stall() -> None:
    """Five minutes after the last microbatch nothing is known of a step yet, and a round of 500 M parameters takes thirteen."""
    records = ME, member("a", stage=1, step=5)
    assert codes(facts_of(*records, still_s=900.0, gap_s=0.0)) == ["stalled"]
    assert codes(facts_of(*records, still_s=900.0, gap_s=0.0, rounds_s=800.0)) == []
    assert codes(facts_of(*records, still_s=1601.0, gap_s=1.0, rounds_s=800.0)) == []
    assert codes(facts_of(*records, still_s=2000.0, gap_s=1.0, rounds_s=800.0)) == ["stalled"]


def test_the_pace_of_a_run_is_that_of_this_step_and_the_last_from_when_every_stage_had_a_peer() -> None:
    seen = advance(None, view_of(ME), 2, NUM_MICROBATCHES, 0.0)

    def at(now_s: float, done: int = 0, step: int = 5) -> None:
        nonlocal seen
        records = replace(ME, done=done, step=step), member("a", stage=1, step=step, done=done)
        seen = advance(seen, view_of(*records), 2, NUM_MICROBATCHES, now_s)

    at(1000.0)
    assert (seen.since_s, seen.began_s, seen.patience_s(2)) == (1000.0, 1000.0, FIRST_PROGRESS_S), "nobody could do anything before"
    at(1060.0, 0b1)
    at(1070.0, 0b11)
    assert (seen.since_s, seen.gap_s, seen.patience_s(2)) == (1070.0, 60.0, 180.0)
    at(1500.0, 0b11, step=6)
    assert (seen.gap_s, seen.last_gap_s, seen.step_s) == (0.0, 430.0, 500.0)
    at(1510.0, 0b1, step=7)
    at(1520.0, 0b11, step=7)
    assert (seen.step_s, seen.patience_s(2)) == (10.0, STALLED_AFTER_S), "the slow step is forgotten"


def test_a_joiner_behind_its_stage_and_steps_given_up_are_named() -> None:
    joiner = replace(ME, phase=Phase.JOINING, step=3)
    assert codes(facts_of(joiner, member("a", step=5, trains=True), member("b", stage=1, step=5))) == ["behind"]
    assert codes(facts_of(replace(joiner, step=0), member("a", step=5), member("b", stage=1, step=5))) == ["joining"]
    plan = "downloads 1200 MB; ready in about 98 s"
    for step, code in ((0, "joining"), (3, "behind")):
        mine = replace(joiner, step=step)
        (note,) = health(facts_of(mine, member("a", step=5, trains=True), member("b", stage=1, step=5), join_plan=plan))
        assert (note.code, plan in note.title) == (code, True)
    never = facts_of(joiner, member("a", step=5, trains=True), member("b", stage=1, step=5), join_plan=plan, cannot_catch_up=True)
    assert codes(never) == ["cannot-catch-up"]
    (note,) = health(facts_of(joiner, member("a", step=3, trains=True), member("b", stage=1, step=5), disputed="unlike"))
    assert (note.code, note.title, "peerd ban" in note.remedy) == ("unlike-states", "unlike", True)
    given_up = replace(ME, lineage=Lineage(2, b"x"))
    assert codes(facts_of(given_up, member("b", stage=1, step=5))) == ["inexact"]


def test_files_that_cannot_be_written_for_one_reason_are_one_state() -> None:
    full, limit = DiskError("/a: the disk is full", "free some space"), LimitError("no more files", "raise the limit")
    assert unwritten_files({}) == []
    disk, files = unwritten_files({"checkpoints": full, "log": limit, "history": DiskError("/b: the disk is full", "free some space")})
    assert (disk.code, disk.severity, disk.title) == ("disk", "problem", "cannot write checkpoints, history: /a: the disk is full")
    assert disk.remedy == "free some space; training goes on, and it is tried again"
    assert (files.code, files.title) == ("disk", "cannot write log: no more files")


def test_files_run_out_by_name_and_before_that_the_peers_that_will_need_more_are_told() -> None:
    assert open_files(50, 1024, 20) == []
    (few,) = open_files(50, 200, 20)
    assert (few.code, few.severity) == ("few-open-files", "warning")
    assert few.title == "50 files are open; this peer needs 384 open files for 20 other peers, and the limit is 200"
    assert "ulimit -n 1024" in few.remedy
    (none_left,) = open_files(190, 200, 20)
    assert (none_left.code, none_left.severity) == ("open-files", "problem")


@given(live_views(), st.floats(0, 1e6))
def test_the_same_view_is_no_progress(live: LiveView, later_s: float) -> None:
    before = advance(None, live, 2, NUM_MICROBATCHES, 0.0)
    assert advance(before, live, 2, NUM_MICROBATCHES, later_s) == before


def test_what_falls_back_is_no_progress_until_it_comes_further_than_before() -> None:
    def at(done: int, step: int = 5, phase: Phase = Phase.ACCUMULATING) -> LiveView:
        return view_of(replace(ME, done=done, step=step, phase=phase), member("a", stage=1, step=5))

    progress = advance(None, at(0b11), 2, NUM_MICROBATCHES, 0.0)
    for number, view in enumerate((at(0), at(0b11), at(0b11, phase=Phase.AVERAGING), at(0b11))):
        progress = advance(progress, view, 2, NUM_MICROBATCHES, 1.0 + number)
    assert progress.since_s == 0.0, "a dropped ledger that is filled again has come no further"
    assert advance(progress, at(0b111), 2, NUM_MICROBATCHES, 9.0).since_s == 9.0
    assert advance(progress, at(0, step=6), 2, NUM_MICROBATCHES, 9.0).since_s == 9.0
    assert advance(progress, at(0, step=2), 2, NUM_MICROBATCHES, 9.0).since_s == 9.0, "resumed at an earlier step"


def test_a_dead_link_between_two_mates_is_told_with_both_and_in_which_direction() -> None:
    mate, elsewhere = member("mate", step=5), member("a", stage=1, step=5)
    deaf = replace(ME, unreached=(mate.peer,))
    (item,) = health(facts_of(deaf, mate, elsewhere))
    assert (item.code, item.title) == ("link-one-way", "me cannot call mate, which can call it")
    (item,) = health(facts_of(deaf, replace(mate, unreached=(ME.peer,)), elsewhere))
    assert (item.code, item.title) == ("link-dead", "mate and me cannot call each other")
    assert health(facts_of(replace(ME, unreached=(elsewhere.peer,)), mate, elsewhere)) == [], "not a mate: others do what it does"


def test_a_peer_that_contradicts_itself_is_named() -> None:
    facts = facts_of(ME, member("mate", stage=1, step=5))
    assert health(facts) == []
    (item,) = health(replace(facts, contradictory=frozenset({PeerId("liar")})))
    assert (item.code, item.severity) == ("contradictory", "warning")
    assert item.title.startswith("liar signed two")


def test_a_peer_that_works_for_nothing_is_told_why() -> None:
    slow = "its upload is too slow for this run (needs 24 Mbit/s, has 5)"
    mate, far = member("mate", step=5), member("far", stage=1, step=5)
    assert health(facts_of(replace(ME, unaveraged=4), mate, far)) == []
    (item,) = health(facts_of(replace(ME, unaveraged=5), mate, far, why_unaveraged=lambda _record: slow))
    assert (item.code, item.severity) == ("unaveraged", "problem")
    assert item.title == f"its gradients have not been in an average for 5 steps: {slow}"
    (item,) = health(facts_of(replace(ME, unaveraged=6), mate, far))
    assert item.title == "its gradients have not been in an average for 6 steps"


def test_everybody_is_told_of_peers_that_work_for_nothing_and_a_liar_accuses_itself_alone() -> None:
    mate, far = member("mate", step=5), member("far", stage=1, step=5, unaveraged=5)
    (item,) = health(facts_of(ME, mate, far, why_unaveraged=lambda record: f"{record.peer} is slow"))
    assert (item.code, item.severity) == ("others-unaveraged", "warning")
    assert item.title == "far: its gradients have not been in an average for 5 steps: far is slow"
    crowd = [member(f"p{number}", step=5, unaveraged=1 << 40) for number in range(9)]
    (item,) = health(facts_of(ME, mate, member("a", stage=1, step=5), *crowd))
    assert item.title.endswith("; and 6 more")
    again = member("far", stage=1, step=5, unaveraged=9, phase=Phase.JOINING)
    assert "others-unaveraged" in codes(facts_of(ME, mate, member("a", stage=1, step=5), again))


def test_hole_36_a_peer_that_is_sidelined_is_named_by_its_mates_and_told_of_it() -> None:
    mate, elsewhere = member("mate", step=5, sidelined=(PeerId("far"), PeerId("me"))), member("a", stage=1, step=5, sidelined=(ME.peer,))
    absent = member("far", step=5)
    assert health(facts_of(ME, mate, absent, elsewhere)) == [], "one mate's word is not enough"
    (item,) = health(facts_of(replace(ME, sidelined=(absent.peer,)), mate, absent, elsewhere))
    assert (item.code, item.severity) == ("sidelined", "warning")
    assert item.title.startswith("far sidelined")
    (item,) = health(facts_of(ME, mate, replace(absent, sidelined=(ME.peer,)), elsewhere))
    assert item.title.startswith("this peer sidelined")


def test_a_peer_that_has_lost_its_standing_reads_it_first_and_others_read_its_name() -> None:
    mine, liar = member("me", step=5, trains=True), PeerId("liar")
    (note,) = [
        note for note in health(facts_of(mine, member("a", stage=1, step=5), convicted=frozenset({liar}))) if note.code == "convicted"
    ]
    assert (note.severity, note.title.split()[0]) == ("warning", "liar")
    told = "3 mates computed this peer's microbatch 4 of step 2 again and got something else"
    (note,) = [each for each in health(facts_of(mine, convicted=frozenset({mine.peer}), own_fault=told)) if each.code == "convicted"]
    assert (note.severity, note.title) == ("problem", told)
    assert "peerd doctor" in note.remedy
