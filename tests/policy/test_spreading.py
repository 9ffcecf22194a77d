"""How news spreads in a large swarm: what is news, who asks whom, who speaks for a stage, and what others make of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.evaluating import is_my_turn
from peerd.policy.route.launching import Standstill, launchable, trainers_of, window
from peerd.policy.step.ledger import held, may_accumulate, missing, stage_step
from peerd.policy.swarm.choosing import Joiner, choose_stage
from peerd.policy.swarm.rebalance import Rebalancing, plan
from peerd.policy.swarm.spreading import (
    KEPT_TURNS,
    MATES_AMONG_PARTNERS,
    MOST_NEWS,
    PARTNERS,
    QUIET_TURNS,
    REST_SHARE,
    SPEAKERS,
    SUMMARISED,
    TURNS_PER_PERIOD,
    News,
    ToldBy,
    concerns,
    partners,
    partners_near,
    periods,
    summarise,
    tag_of,
    whom_to_ask,
)
from peerd.table.record import MAX_PERIODS, AverageId, PeerId, PeerRecord, Phase, RawRecord, Reach, StageSummary, Suspicion
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, member, stage_of, view_of

PERIOD_S = 5.0
KEPT_S = KEPT_TURNS * PERIOD_S / QUIET_TURNS


def raw(record: PeerRecord) -> RawRecord:
    return (f"{record.peer} {record.version}".encode(), b"")


def tag(record: PeerRecord) -> bytes:
    return tag_of(record, raw(record))


def noted(*records: PeerRecord, now_s: float = 0.0) -> News:
    news = News(PERIOD_S)
    for record in records:
        news.note(record, raw(record), now_s)
    return news


def summary(**numbers: object) -> StageSummary:
    return StageSummary(**{"peers": 40, "trainers": 0, "queue": 0, "throughput": 40.0, "held": 0, **numbers})  # type: ignore[arg-type]


def large(told: StageSummary, **mine: object) -> LiveView:
    """I am at stage 0, know its peers and stage 1's, and am told of stage 3 by one of its own."""
    me = member("me", **{"stage": 0, "throughput": 1.0, **mine})
    return view_of(me, *stage_of(0, 5, throughput=1.0), *stage_of(1, 5, throughput=1.0), member("far", stage=3, step=0, summary=told))


# What is news


def test_what_rose_is_told_to_those_who_do_not_name_it_and_not_to_those_who_do() -> None:
    old, new = member("a", version=1), member("b", version=9)
    news = noted(old, new)
    assert news.unknown_to([], None, 1.0) == [raw(new), raw(old)]
    assert news.unknown_to([tag(new)], None, 1.0) == [raw(old)]
    assert news.unknown_to(news.tags(1.0), None, 1.0) == []


def test_whoever_has_a_newer_version_is_not_told_the_old_one_and_a_restart_is_told_whatever_its_version() -> None:
    news = noted(member("a", version=5))
    assert news.unknown_to([tag(member("a", version=6))], None, 0.0) == []
    assert news.unknown_to([tag(member("a", version=4))], None, 0.0) == [raw(member("a", version=5))]
    restarted = noted(member("a", incarnation=1, version=0))
    assert restarted.unknown_to([tag(member("a", version=40_000))], None, 0.0) != []


@given(st.integers(0, 1 << 40), st.integers(1, 32_767))
def test_versions_near_each_other_are_told_apart_however_often_the_tag_has_gone_round(version: int, ahead: int) -> None:
    older, newer = member("a", version=version), member("a", version=version + ahead)
    assert noted(newer).unknown_to([tag(older)], None, 0.0) == [raw(newer)]
    assert noted(older).unknown_to([tag(newer)], None, 0.0) == []


def test_news_are_no_news_after_a_while() -> None:
    news = noted(member("a"))
    assert news.unknown_to([], None, KEPT_S - 0.1) != []
    assert news.unknown_to([], None, KEPT_S) == []
    assert news.tags(KEPT_S) == []


def test_where_nothing_but_renewals_come_one_asks_more_seldom() -> None:
    first = member("a", version=1)
    news = noted(first)
    assert news.turn_s(0.0) == PERIOD_S / QUIET_TURNS, "a newcomer tells all itself"
    news.note(replace(first, version=2), raw(first), PERIOD_S)
    assert news.turn_s(PERIOD_S) == PERIOD_S / QUIET_TURNS
    news.note(replace(first, version=3, step=1), raw(first), 2 * PERIOD_S)
    assert news.turn_s(2.9 * PERIOD_S) == PERIOD_S / TURNS_PER_PERIOD
    assert news.turn_s(3.1 * PERIOD_S) == PERIOD_S / QUIET_TURNS


def test_a_version_that_says_nothing_new_long_before_it_is_due_goes_no_further() -> None:
    first = member("a", version=1)
    busy, announced = replace(first, version=2, done=5), replace(first, version=3, done=5)
    news = noted(first)
    news.note(busy, raw(busy), 1.0)
    assert news.unknown_to([], None, 1.0) == [raw(first)]
    news.note(announced, raw(announced), PERIOD_S)
    assert news.unknown_to([], None, PERIOD_S) == [raw(announced)]


def test_a_ledger_that_rests_is_news_for_mates_and_one_that_grows_is_none() -> None:
    """Rounds of a large stage wait for it."""
    first, news = member("a", version=1, stage=4, periods=30), News(PERIOD_S)
    news.note(first, raw(first), 0.0, ToldBy.OWN)
    grown = first
    for number in range(1, 15):
        grown = replace(grown, version=1 + number, done=grown.done | 1 << number)
        news.note(grown, raw(grown), 3.0 * number, ToldBy.OWN)
        assert news.unknown_to([], 4, 3.0 * number) in ([], [raw(first)])
    rests_s = 42.0 + REST_SHARE * 42.0
    assert news.unknown_to([tag(first)], 4, rests_s - 0.1) == []
    assert news.unknown_to([tag(first)], 4, rests_s) == [raw(grown)]
    assert news.unknown_to([tag(first)], 5, rests_s) == [], "the stage beside it does not go by it"
    assert news.turn_s(rests_s) == PERIOD_S / TURNS_PER_PERIOD


def test_what_was_news_for_mates_elsewhere_is_so_here_and_what_a_peer_pushed_is_named_and_not_passed_on() -> None:
    first = member("a", version=1, stage=4, periods=30)
    grown = replace(first, version=2, done=6)
    passed_on, pushed = noted(first, now_s=-40.0), noted(first, now_s=-40.0)
    assert passed_on.tags(0.0) == []
    passed_on.note(grown, raw(grown), 1.0, ToldBy.PASSED_ON)
    assert passed_on.unknown_to([], 4, 1.0) == [raw(grown)]
    assert passed_on.unknown_to([], 3, 1.0) == []
    pushed.note(grown, raw(grown), 1.0, ToldBy.PUSHED)
    assert tag(grown) in pushed.tags(2.0), "otherwise each answer brings it again"
    assert pushed.unknown_to([], 4, 2.0) == []
    assert pushed.unknown_to([], 4, 40.0) == []
    assert pushed.tags(KEPT_S + 1.0) == []


@pytest.mark.parametrize("change", [{"group": AverageId(b"g" * 16), "own_done": 1}, {"sections": 2}, {"sidelined": (PeerId("b"),)}])
def test_what_rounds_of_mates_wait_for_is_news_for_them_within_a_period(change: dict[str, object]) -> None:
    first = member("a", version=1, stage=4, periods=30)
    changed = replace(first, version=2, **change)  # type: ignore[arg-type]
    news = noted(first)
    news.note(changed, raw(changed), 1.0)
    assert news.unknown_to([tag(first)], 4, PERIOD_S - 0.1) == []
    assert news.unknown_to([tag(first)], 4, PERIOD_S) == [raw(changed)]


def test_whom_a_peer_suspects_is_news_for_the_stages_beside_it_too() -> None:
    """Callers of a peer that died know it first. Its mates would count what it held until its record expires, after minutes."""
    first = member("a", version=1, stage=4, periods=30)
    accuses = replace(first, version=2, suspects=(Suspicion(PeerId("dead"), 1, 1),))
    news, passed_on = noted(first, now_s=-30.0), noted(first, now_s=-30.0)
    assert news.tags(0.0) == passed_on.tags(0.0) == []
    news.note(accuses, raw(accuses), 1.0)
    passed_on.note(accuses, raw(accuses), 1.0, ToldBy.PASSED_ON)
    assert news.unknown_to([], 5, 1.0) == passed_on.unknown_to([], 5, 1.0) == [raw(accuses)]


def test_what_replaces_news_for_near_stages_is_for_them_too_and_their_renewals_are_not_put_off() -> None:
    first = member("a", version=1, stage=4, periods=30)
    grown, later = replace(first, version=2, done=6), replace(first, version=3, done=6)
    news = noted(first)
    news.note(grown, raw(grown), 1.0, ToldBy.PASSED_ON)
    assert news.unknown_to([], 3, 1.0) == [raw(grown)]
    news.note(later, raw(later), 51.0)
    assert news.unknown_to([], 3, 51.0) == [raw(later)], "50 s after it was last news for all"


@pytest.mark.parametrize("change", [{"step": 1}, {"phase": Phase.AVERAGED}, {"incarnation": 1}, {"leaving": True}])
def test_a_change_is_news_at_once(change: dict[str, object]) -> None:
    first = member("a", version=1)
    changed = replace(first, version=2, **change)  # type: ignore[arg-type]
    news = noted(first)
    news.note(changed, raw(changed), 0.1)
    assert news.unknown_to([], None, 0.1) == [raw(changed)]


def test_one_answer_is_bounded_and_the_newest_come_first() -> None:
    many = [member(f"p{number:03}") for number in range(2 * MOST_NEWS)]
    assert noted(*many).unknown_to([], None, 0.0) == [raw(record) for record in reversed(many[MOST_NEWS:])]


def test_of_a_large_swarm_one_is_told_of_the_own_stage_its_neighbours_and_speakers() -> None:
    told = [member("own", stage=4), member("next", stage=5), member("before", stage=3), member("speaker", stage=9, summary=summary())]
    assert all(concerns(record, 4) for record in told)
    assert not concerns(member("far", stage=6), 4)
    assert noted(*told, member("far", stage=6)).unknown_to([], 4, 0.0) == [raw(record) for record in reversed(told)]


# Who asks whom, and how often


def test_only_speakers_ask_speakers_of_far_stages_unless_nobody_else_is_there() -> None:
    chances = [(first, second) for first in (0.0, 0.99) for second in (0.0, 0.5, 0.99)]
    assert {whom_to_ask(False, [1, 2], [9], draws) for draws in chances} == {1, 2}
    assert {whom_to_ask(True, [1, 2], [9], draws) for draws in chances} == {1, 2, 9}
    assert {whom_to_ask(False, [], [9], draws) for draws in chances} == {9}
    assert {whom_to_ask(True, [], [], draws) for draws in chances} == {None}


def test_most_partners_of_a_large_stage_are_mates_and_what_lacks_comes_from_the_others() -> None:
    mates, others = [PeerId(f"m{number}") for number in range(100)], [PeerId(f"o{number}") for number in range(100)]
    chosen = partners_near(PeerId("me"), mates, others)
    assert len({*chosen}) == PARTNERS
    assert len({*chosen} & {*mates}) == MATES_AMONG_PARTNERS
    assert len(partners_near(PeerId("me"), mates[:2], others)) == len(partners_near(PeerId("me"), mates, others[:2])) == PARTNERS
    assert {*partners_near(PeerId("me"), mates[:3], others[:3])} == {*mates[:3], *others[:3]}


def test_partners_are_the_same_whatever_the_order_and_differ_from_peer_to_peer() -> None:
    near = [PeerId(f"p{number}") for number in range(100)]
    assert partners(PeerId("me"), near) == partners(PeerId("me"), near[::-1])
    assert len(partners(PeerId("me"), near)) == PARTNERS
    assert partners(PeerId("me"), near) != partners(PeerId("you"), near)
    assert partners(PeerId("me"), near[:3]) != []


@given(st.integers(0, 100_000))
def test_however_many_one_knows_the_announcements_of_a_period_stay_as_many(num_known: int) -> None:
    assert periods(0) == 1
    assert num_known / periods(num_known) < 32 or periods(num_known) == MAX_PERIODS


@pytest.mark.parametrize(
    "told", [{"gradient_norm": 1.5}, {"tied_sum": AverageId(b"sum")}, {"average_id": AverageId(b"other")}, {"reach": Reach.RELAYED}]
)
def test_what_others_wait_for_is_news_though_the_phase_stays(told: dict[str, object]) -> None:
    averaged = member("a", phase=Phase.AVERAGED, average_id=AverageId(b"one"), version=1)
    news = noted(averaged, replace(averaged, version=2, **told))  # type: ignore[arg-type]
    assert [tag(replace(averaged, version=2))] == news.tags(0.0)
    silent = noted(averaged, replace(averaged, version=2))
    assert silent.unknown_to([], None, 0.0) == [raw(averaged)]


# Who speaks for a stage


def spoken(live: LiveView) -> list[StageSummary]:
    found = (summarise(record, replace(live, me=record.peer)) for record in live.records)
    return [each for each in found if each is not None]


def test_in_a_small_swarm_nobody_speaks_for_others() -> None:
    assert spoken(view_of(*stage_of(0, SUMMARISED - 1))) == []


def test_a_few_speak_for_each_stage_of_a_large_one_and_add_up_its_numbers() -> None:
    half = SUMMARISED // 2
    live = view_of(*stage_of(0, half, queue=2, throughput=1.5, trains=True, done=1), *stage_of(1, half, done=6))
    told = spoken(live)
    assert len(told) == 2 * SPEAKERS
    assert told[0] == StageSummary(peers=half, trainers=half, queue=2 * half, throughput=1.5 * half, held=1)
    assert told[-1].held == 6


def test_where_steps_overlap_they_tell_of_the_next_step_too() -> None:
    members = stage_of(0, SUMMARISED, done=1, ledger_no=1, next_done=4, next_ledger_no=2)
    assert [(each.held, each.next_held) for each in spoken(view_of(*members))] == [(1, 4)] * SPEAKERS


def test_those_that_leave_or_join_do_not_speak() -> None:
    live = view_of(*stage_of(0, SUMMARISED, leaving=True), *stage_of(1, SUMMARISED, phase=Phase.JOINING))
    assert spoken(live) == []


# What others make of it


def test_what_a_far_stage_holds_is_not_launched_again() -> None:
    assert missing(large(summary(held=0b111)), 3, 0, NUM_MICROBATCHES) == FULL & ~0b111
    assert missing(large(summary(held=FULL)), 3, 1, NUM_MICROBATCHES) == FULL  # of another step than theirs
    assert missing(large(summary(next_held=0b110)), 3, 1, NUM_MICROBATCHES) == FULL & ~0b110
    assert missing(large(summary(next_held=FULL)), 3, 0, NUM_MICROBATCHES) == FULL


def test_whether_a_gradient_may_be_added_never_hangs_on_what_somebody_tells_of_others() -> None:
    me = member("me", stage=3)
    live = view_of(me, *stage_of(3, 3), member("liar", stage=3, summary=summary(held=FULL)))
    assert may_accumulate(me, live, step=0, index=0, accept_mark=(0, 0)) is None
    assert missing(live, 3, 0, NUM_MICROBATCHES) == FULL


def everybodys(views: Iterable[LiveView]) -> list[int]:
    return sorted(launch.index for view in views for launch in launchable(view, 4, NUM_MICROBATCHES, Standstill(), 0.0, 4.0).launches)


def test_trainers_who_do_not_know_each_other_do_not_launch_the_same_twice() -> None:
    stages = [stage_of(stage, 4, trains=stage > 0) for stage in range(4)]
    speakers = [replace(stage[0], summary=summary(trainers=4 if stage[0].stage else 0)) for stage in stages]
    views = []
    for stage in range(4):
        near = [record for other in stages if abs(other[0].stage - stage) <= 1 for record in other[1:]]
        views += [replace(view_of(*near, *speakers), me=record.peer) for record in [*stages[stage][1:], speakers[stage]]]
    assert everybodys(views) == list(range(NUM_MICROBATCHES))
    assert {record.stage for view in views for record in view.records if record.peer in trainers_of(view, 0)} == {1}
    assert sum(is_my_turn(view, 3, 0.0, 4.0) for view in views) == 1


def test_a_stage_of_which_one_knows_only_its_speaker_counts_with_all_its_peers() -> None:
    me = member("joiner", stage=0, phase=Phase.JOINING)
    known = [*stage_of(0, 5, throughput=1.0), *stage_of(1, 6, throughput=1.0)]
    told = member("far", stage=2, throughput=1.0, summary=summary(throughput=40.0))
    assert choose_stage(view_of(me, *known, told), Joiner(lacking=["", "", ""])).stage == 0
    assert large(summary(peers=40)).num_serving(3) == 40
    assert window(large(summary()), 2, 100) == window(view_of(*large(summary()).records), 2, 100)


def test_of_several_that_speak_for_a_stage_one_wrong_one_changes_nothing() -> None:
    liar = member("liar", stage=3, summary=summary(peers=1 << 20, throughput=1e12))
    live = view_of(*large(summary()).records, *(member(f"far{n}", stage=3, summary=summary()) for n in range(2)), liar)
    live = replace(live, me=PeerId("me"))
    assert live.summary(3) == summary()


def with_speakers(*told: tuple[int, StageSummary]) -> LiveView:
    """A view from stage 0 on stage 3, of which peers at these steps tell this; the last one lies."""
    records = (member(f"far{number}", stage=3, step=step, summary=each) for number, (step, each) in enumerate(told))
    return replace(view_of(*(r for r in large(summary()).records if r.stage != 3), *records), me=PeerId("me"))


@pytest.mark.parametrize("step", [0, 1, 9])
@pytest.mark.parametrize("lie", [summary(held=FULL, next_held=FULL), summary()])
def test_of_several_that_tell_what_a_stage_holds_one_wrong_one_does_not_decide_what_is_launched(step: int, lie: StageSummary) -> None:
    honest = summary(held=0b011, next_held=0b100)
    live = with_speakers((1, honest), (1, honest), (step, lie))
    assert stage_step(live, 3) == 1
    assert missing(live, 3, 1, NUM_MICROBATCHES) == FULL & ~0b011
    early = with_speakers((0, honest), (0, honest), (step, lie))
    assert stage_step(early, 3) == 0
    assert missing(early, 3, 1, NUM_MICROBATCHES) == FULL & ~0b100


def test_one_speaker_that_tells_of_trainers_that_are_not_there_keeps_nobody_from_launching() -> None:
    told = [member(f"far{n}", stage=0, summary=summary(trainers=9 * (n == 0))) for n in range(3)]
    live = replace(view_of(*stage_of(3, 5, trains=True), *told), me=PeerId("s3p000"))
    assert trainers_of(live, 0) == [record.peer for record in stage_of(3, 5)]


def test_a_speaker_that_is_behind_for_a_moment_holds_nothing_up() -> None:
    live = with_speakers((1, summary(held=0b11)), (1, summary(held=0b11)), (0, summary(held=FULL)))
    assert missing(live, 3, 1, NUM_MICROBATCHES) == FULL & ~0b11
    assert held(with_speakers((1, summary(held=0b11))), 3, 1) == 0b11, "where one speaks it is believed"
    assert held(with_speakers((1, summary(held=0b11)), (1, summary(held=0b10))), 3, 1) == 0b10


@given(st.lists(st.integers(0, FULL), min_size=1, max_size=15))
def test_what_a_stage_holds_is_what_more_than_half_of_its_speakers_say(words: list[int]) -> None:
    live = with_speakers(*((1, summary(held=word)) for word in words))
    expected = sum(1 << bit for bit in range(NUM_MICROBATCHES) if 2 * sum(word >> bit & 1 for word in words) > len(words))
    assert held(live, 3, 1) == expected


def test_nobody_moves_to_a_stage_that_is_strong_by_what_its_speaker_tells() -> None:
    weak = plan(large(summary(throughput=0.5)), 4, 0, Rebalancing())
    assert plan(large(summary(throughput=6.0)), 4, 0, Rebalancing()).reason.startswith("stage 2")  # which has nobody
    assert weak.reason.startswith("stage 2")
    served = replace(large(summary(throughput=6.0)), records=(*large(summary(throughput=6.0)).records, *stage_of(2, 6, throughput=1.0)))
    assert not plan(served, 4, 0, Rebalancing()).moves
