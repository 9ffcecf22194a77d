"""What several peers' tallies amount to, and which of them cannot be true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.contributions import Report, StageTally, Tally, merge, unaveraged_after, why_impossible
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.table.record import PeerId

SPAN, PER_STEP = 100, 8
NAMES = st.sampled_from("abcd")
TALLIES = st.lists(st.builds(Tally, peer=NAMES, steps=st.integers(1, 9), microbatches=st.integers(0, 99)), unique_by=lambda t: t.peer)
REPORTS = st.lists(
    st.builds(
        Report,
        reporter=NAMES,
        tally=st.builds(
            StageTally,
            stage=st.integers(0, 2),
            first_step=st.just(0),
            last_step=st.just(99),
            steps=st.integers(1, 100),
            tallies=TALLIES.map(tuple),
        ),
    ),
    unique_by=lambda report: (report.reporter, report.tally.stage),
)


def report(reporter: str, steps: int = 10, **microbatches: int) -> Report:
    tallies = tuple(Tally(peer=peer, steps=steps, microbatches=count) for peer, count in microbatches.items())
    return Report(reporter=reporter, tally=StageTally(stage=0, first_step=0, last_step=99, steps=steps, tallies=tallies))


def shown(*reports: Report, mine: str = "") -> dict[str, int]:
    """The counts of a run of 100 steps, each of eight microbatches."""
    (stage,) = merge(reports, SPAN, PER_STEP, mine)
    return {row.peer: row.microbatches for row in stage.rows}


def test_a_peers_own_row_is_told_by_others() -> None:
    (stage,) = merge([report("liar", steps=98, liar=700, b=20), report("b", steps=98, liar=5, b=600)], SPAN, PER_STEP)
    assert {row.peer: (row.microbatches, row.reporter) for row in stage.rows} == {"liar": (5, "b"), "b": (20, "liar")}


def test_alone_in_its_stage_a_peer_has_its_own_word_only() -> None:
    (stage,) = merge([report("a", a=40)], SPAN, PER_STEP)
    assert [(row.peer, row.reporter) for row in stage.rows] == [("a", "a")]


def test_who_counted_longest_is_believed() -> None:
    (stage,) = merge([report("newcomer", steps=2, a=3), report("b", steps=90, a=300)], SPAN, PER_STEP)
    assert (stage.steps, stage.rows[0].microbatches) == (90, 300)


def test_a_newcomers_short_count_does_not_belittle_who_was_there_before() -> None:
    (stage,) = merge([report("old", steps=90, old=700), report("new", steps=3, old=20, new=4)], SPAN, PER_STEP)
    assert {row.peer: (row.microbatches, row.reporter) for row in stage.rows} == {"old": (700, "old"), "new": (4, "new")}


@pytest.mark.parametrize(
    "lie",
    [
        report("liar", steps=100, liar=800),
        report("liar", steps=100, friend=800),
        report("liar", steps=100, a=0, b=0, c=0),
        report("liar", steps=1),
        report("liar", steps=98, a=277, b=300, c=259, friend=17),
    ],
)
def test_one_reporter_that_lies_about_all_others_changes_no_row(lie: Report) -> None:
    """Before, the row of the reporter that said to have counted most steps was shown."""
    truth = {"a": 260, "b": 260, "c": 260}
    honest = [report(name, steps=98, **truth) for name in "abc"]
    assert shown(*honest, lie) == truth == shown(*honest)
    assert shown(honest[0], honest[1], lie, mine="a") == truth


def test_this_peers_own_count_is_not_outvoted() -> None:
    lies = [report(name, steps=100, friend=800) for name in ("x", "y", "z")]
    assert shown(report("a", steps=100, a=400), *lies, mine="a") == {"a": 400}


def test_the_steps_shown_are_those_of_this_peers_own_report_or_of_the_second_longest() -> None:
    reports = [report("a", steps=11, a=11), report("b", steps=7, a=7), report("c", steps=6, a=6)]
    assert [merge(reports, SPAN, PER_STEP, mine)[0].steps for mine in ("a", "b", "")] == [11, 7, 7]


def test_a_peer_that_came_late_leaves_room_for_what_was_before() -> None:
    """It cannot contradict a count of steps that it has not seen, so there the longest count is shown, though it may be a lie."""
    late = [report(name, steps=40, a=100, b=100) for name in "bc"]
    assert shown(*late, report("a", steps=98, a=500, b=284)) == {"a": 500, "b": 284}
    assert shown(*late, report("a", steps=98, a=581, b=284)) == {"a": 100, "b": 284}


@given(st.lists(st.dictionaries(NAMES, st.integers(0, 8), max_size=4), min_size=1, max_size=20), st.data())
def test_honest_reporters_that_came_at_any_time_are_shown_as_the_one_that_counted_longest(
    steps: list[dict[str, int]], data: st.DataObject
) -> None:
    """`steps`: what each peer has computed in each step."""
    reports, longest = list[Report](), len(steps)
    for name in data.draw(st.lists(NAMES, min_size=1, unique=True)):
        first = data.draw(st.integers(0, len(steps) - 1))
        longest = min(longest, first)
        reports.append(counted(name, steps[first:]))
    (stage,) = merge(reports, len(steps), 4 * PER_STEP)
    total = {row.peer: row.microbatches for row in counted("", steps[longest:]).tally.tallies}
    assert {row.peer: row.microbatches for row in stage.rows} == total


def counted(reporter: str, steps: list[dict[str, int]]) -> Report:
    done = {peer: [step[peer] for step in steps if step.get(peer)] for peer in "abcd"}
    rows = tuple(Tally(peer=peer, steps=len(each), microbatches=sum(each)) for peer, each in done.items() if each)
    return Report(reporter=reporter, tally=StageTally(stage=0, first_step=0, last_step=99, steps=len(steps), tallies=rows))


@given(REPORTS)
def test_rows_are_those_of_reporters(reports: list[Report]) -> None:
    for stage in merge(reports, SPAN, PER_STEP):
        of_stage = {r.reporter: r.tally.tallies for r in reports if r.tally.stage == stage.stage}
        assert len({row.peer for row in stage.rows}) == len(stage.rows)
        for row in stage.rows:
            assert (row.peer, row.microbatches) in {(tally.peer, tally.microbatches) for tally in of_stage[row.reporter]}


def rising(step: int) -> int:
    """Tokens of a microbatch while sequences grow."""
    return 16 if step >= 20 else 8


SOUND = report("a", a=40, b=40).tally


@pytest.mark.parametrize(
    "broken",
    [
        replace(SOUND, stage=2),
        replace(SOUND, steps=101),
        replace(SOUND, steps=0),
        replace(SOUND, tallies=(*SOUND.tallies, Tally(peer="c", steps=11, microbatches=0))),
        replace(SOUND, tallies=(*SOUND.tallies, Tally(peer="a", steps=1, microbatches=0))),
        replace(SOUND, tallies=(*SOUND.tallies, Tally(peer="c", steps=1, microbatches=1))),
        replace(SOUND, tallies=(replace(SOUND.tallies[0], tokens=40 * 16 + 1),)),
        replace(SOUND, tallies=(replace(SOUND.tallies[0], tokens=40 * 8 - 1),)),
        replace(SOUND, last_step=10, steps=10, tallies=(replace(SOUND.tallies[0], tokens=40 * 16),)),
    ],
)
def test_a_tally_that_cannot_be_true_is_refused(broken: StageTally) -> None:
    assert why_impossible(SOUND, 2, 99, 8, rising) is None
    assert why_impossible(broken, 2, 99, 8, rising) is not None


def test_steps_that_the_run_has_not_reached_are_not_counted() -> None:
    ahead = replace(SOUND, first_step=0, last_step=10**9, steps=10**9)
    assert why_impossible(ahead, 2, 30, 8, rising) == "the run has not come that far"


@given(st.integers(0, 30), st.lists(st.integers(0, 8), min_size=1, max_size=30))
def test_tokens_counted_step_by_step_are_never_refused(first: int, counts: list[int]) -> None:
    tokens = sum(count * rising(first + number) for number, count in enumerate(counts))
    row = Tally(peer="a", steps=len(counts), microbatches=sum(counts), tokens=tokens)
    told = StageTally(stage=0, first_step=first, last_step=first + len(counts) - 1, steps=len(counts), tallies=(row,))
    assert why_impossible(told, 1, first + len(counts), 8, rising) is None
    (stage,) = merge([Report(reporter="b", tally=told)], first + len(counts), 8)
    assert stage.rows[0].tokens == tokens


def roster_of(**ledgers: int) -> Roster:
    entries = tuple(RosterEntry(PeerId(peer), 1, 1, done) for peer, done in sorted(ledgers.items()))
    return Roster(stage=0, step=7, attempt=0, leader=entries[0].peer, entries=entries)


def test_steps_without_a_peers_gradients_are_counted_in_a_row() -> None:
    me, without = PeerId("me"), roster_of(mate=0b11)
    assert unaveraged_after(0, without, me, had_work=True) == 1
    assert unaveraged_after(4, without, me, had_work=True) == 5
    assert unaveraged_after(4, roster_of(mate=0b01, me=0b10), me, had_work=True) == 0
    assert unaveraged_after(4, roster_of(mate=0b11, me=0), me, had_work=True) == 5
    assert unaveraged_after(4, without, me, had_work=True, in_group=True) == 0, "a mate has brought the sum that they made together"


def test_a_peer_that_gets_no_work_works_not_for_nothing_unless_it_was_left_out_before() -> None:
    me, without = PeerId("me"), roster_of(mate=0b11)
    assert unaveraged_after(0, without, me, had_work=False) == 0
    assert unaveraged_after(1, without, me, had_work=False) == 2
    assert unaveraged_after(1, roster_of(mate=0b11, me=0), me, had_work=False) == 1
