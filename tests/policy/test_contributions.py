"""What several peers' tallies amount to, and which of them cannot be true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.contributions import ABOUT_AS_LONG, Report, StageTally, Tally, merge, unaveraged_after, why_impossible
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.table.record import PeerId

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


def test_a_peers_own_row_is_told_by_others() -> None:
    (stage,) = merge([report("liar", steps=90, liar=700, b=20), report("b", steps=80, liar=5, b=600)])
    assert {row.peer: (row.microbatches, row.reporter) for row in stage.rows} == {"liar": (5, "b"), "b": (20, "liar")}


def test_alone_in_its_stage_a_peer_has_its_own_word_only() -> None:
    (stage,) = merge([report("a", a=40)])
    assert [(row.peer, row.reporter) for row in stage.rows] == [("a", "a")]


def test_who_counted_longest_is_believed() -> None:
    (stage,) = merge([report("newcomer", steps=2, a=3), report("b", steps=90, a=300)])
    assert (stage.steps, stage.rows[0].microbatches) == (90, 300)


def test_a_newcomers_short_count_does_not_belittle_who_was_there_before() -> None:
    (stage,) = merge([report("old", steps=90, old=700), report("new", steps=3, old=20, new=4)])
    assert {row.peer: (row.microbatches, row.reporter) for row in stage.rows} == {"old": (700, "old"), "new": (4, "new")}


@given(REPORTS)
def test_everybody_who_is_told_of_has_one_row_by_whoever_counted_longest(reports: list[Report]) -> None:
    for stage in merge(reports):
        of_stage = [r for r in reports if r.tally.stage == stage.stage]
        told_by = {name: {r.reporter: r.tally.steps for r in of_stage if any(t.peer == name for t in r.tally.tallies)} for name in "abcd"}
        assert sorted(row.peer for row in stage.rows) == sorted(name for name, reporters in told_by.items() if reporters)
        for row in stage.rows:
            longest, others = max(told_by[row.peer].values()), {k: v for k, v in told_by[row.peer].items() if k != row.peer}
            assert told_by[row.peer][row.reporter] >= ABOUT_AS_LONG * longest
            if row.reporter == row.peer:
                assert all(steps < ABOUT_AS_LONG * longest for steps in others.values())


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
    (stage,) = merge([Report(reporter="b", tally=told)])
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
