"""The rules of a round of averaging: what a member owes, whom an edge puts out, what a proposal assumes, which chunk is next."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.chunks import AFTER_OWN, LOSSY_ROW_S, ROW_S, WINDOW, Flow, chunk_bytes, next_flow, num_chunks
from peerd.policy.round.debts import RETURNS, Debts, Edge
from peerd.policy.round.edges import PastEdges, mate_for, named_by, whom_to_leave_out
from peerd.policy.round.links import HomeLink, Line, LinkBreak, RoundLinks
from peerd.policy.round.proposing import SLOWDOWN, assumed_s, believed, fit, most_s, turn_after_s, usual_s
from peerd.policy.round.simulated import RoundPlan, simulate
from peerd.policy.round.slices import exchange_s, shares_by_rate
from peerd.table.record import PeerId

T = 9.0
MBIT = 1e6 / 8
rates = st.lists(st.floats(0.1, 1000.0), min_size=2, max_size=8)


# What a member owes


@given(st.lists(st.sampled_from([0, 1000]), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_while_a_round_is_not_done_somebody_owes_and_who_owes_can_send(slice_bytes: list[int], random: Random) -> None:
    debts = Debts([*slice_bytes, 1000], 6, T, T)
    for _ in range(1000):
        owed = [(i, k) for i in debts.members for k in debts.members if debts.owes(i, k)]
        assert bool(owed) != debts.is_done
        if not owed:
            return
        source, target = random.choice(owed)
        has, sums = debts.parts[source][target], debts.sums[source][target]
        if sums < debts.summed[source]:
            debts.told_sum(source, target, sums + 1, 0.0)
        else:
            assert has - debts.summed[target] < WINDOW
            debts.told_part(source, target, has + 1, 0.0)
    pytest.fail("it does not end")


def stalled() -> Debts:
    """A round of three in which member 0 sends nothing, and the others have sent each other what they can."""
    debts = Debts([800, 800, 800], 8, T, T)
    for author, reducer in ((1, 2), (2, 1), (1, 0), (2, 0)):
        debts.told_part(author, reducer, 8 if reducer == 0 else WINDOW, 0.5)
    return debts


def looks(debts: Debts, until_s: float, silent: int = -1) -> None:
    for number in range(1, int(until_s) + 1):
        for member in debts.members:
            if member != silent:
                debts.heard(member, float(number))
        debts.look(float(number))


def test_who_waits_for_others_owes_nothing() -> None:
    debts = stalled()
    assert [debts.owes(1, k) for k in range(3)] == [False, False, False]
    assert [debts.owes(0, k) for k in range(3)] == [False, True, True]


def test_a_member_that_owes_and_moves_nothing_is_at_fault_after_one_averaging_time() -> None:
    debts = stalled()
    looks(debts, 30.0)
    assert debts.at_fault(T - 0.1) == []
    assert [fault.member for fault in debts.at_fault(T)] == [0]
    assert debts.at_fault(T, later=1.0) == []
    assert debts.behind(T) == [Edge(0, 1), Edge(0, 2)]


def test_a_chunk_that_is_told_twice_is_no_progress() -> None:
    debts = Debts([0, 800], 8, T, T)
    debts.told_part(0, 1, 1, 0.6)
    debts.told_sum(1, 0, 1, 0.6)
    debts.told_part(0, 1, 1, 8.0)
    looks(debts, 9.0)
    assert debts.at_fault(9.5) == []
    assert [fault.member for fault in debts.at_fault(9.6)] == [0]


def test_the_clock_of_a_silent_member_stands() -> None:
    debts = stalled()
    looks(debts, 30.0, silent=0)
    assert debts.at_fault(30.0) == []
    assert debts.silent_s(0, 30.0) == 30.0
    debts.heard(0, 30.0)
    assert debts.at_fault(30.0 + T - 1.0 - 0.25 * T) == []
    assert [fault.member for fault in debts.at_fault(30.0 + T)] == [0]


def test_hole_44_a_member_that_is_heard_of_again_has_its_averaging_time_anew_a_few_times_in_a_round() -> None:
    """Its connections take a while to notice that the link is not dead any more."""
    debts = stalled()
    for number in range(RETURNS + 2):
        began_s = 100.0 * number
        for moment in (0.0, 0.2, 0.4):
            for member in debts.members:
                debts.heard(member, began_s + moment * T)
            debts.look(began_s + moment * T)
        assert bool(debts.at_fault(began_s + 0.5 * T)) == (number > RETURNS)
        debts.look(began_s + 0.8 * T)


def test_a_member_that_moves_less_than_half_of_what_is_assumed_is_at_fault_after_three_averaging_times() -> None:
    for rate, is_slow in ((1.0, True), (2.7, False)):
        debts = Debts([4000, 4000], 40, 2 * T, T)
        debts.told_part(1, 0, 40, 0.1)
        for number in range(1, int(3 * T) + 2):
            sent = int(rate * number)
            debts.told_part(0, 1, (sent + 1) // 2, float(number))
            debts.told_sum(0, 1, sent // 2, float(number))
            debts.told_sum(1, 0, (sent + 1) // 2, number + 0.1)
            looks_at(debts, number + 0.1)
        faults = [fault.member for fault in debts.at_fault(3 * T + 1)]
        assert (0 in faults) == is_slow


def looks_at(debts: Debts, now_s: float) -> None:
    for member in debts.members:
        debts.heard(member, now_s)
    debts.look(now_s)


def test_what_a_mate_carries_is_owed_by_the_sender_until_the_mate_has_it_and_then_by_the_mate() -> None:
    debts = Debts([800, 800, 0], 8, T, T)
    debts.carry(Edge(0, 1), 2, 1.0)
    assert not debts.owes(0, 1)
    assert debts.owes(0, 2)
    for chunks in range(1, WINDOW + 1):
        debts.told_carried(Edge(0, 1), chunks, 2.0)
    assert not debts.owes(0, 2)
    debts.told_part(2, 1, 8, 3.0)
    assert debts.owes(2, 1)
    debts.told_part(0, 1, WINDOW, 3.0)
    assert not debts.owes(2, 1)
    assert debts.owes(0, 2)
    debts.told_carried(Edge(0, 1), WINDOW + 2, 4.0)
    debts.lost(Edge(0, 1), 5.0)
    assert debts.carried[Edge(0, 1)] == WINDOW


def test_what_was_under_way_when_a_mate_was_named_is_the_senders_own() -> None:
    """A chunk of a slow line takes long, so a mate is named before it arrives; then its author was at fault, though it had sent one."""
    debts = Debts([0, 0, 800], 8, T, T)
    debts.told_part(2, 2, 8, 0.0)
    debts.carry(Edge(0, 2), 1, 0.5 * T)
    looks_at(debts, 0.6 * T)
    debts.told_part(0, 2, 1, 0.7 * T)
    looks_at(debts, 0.7 * T)
    looks_at(debts, 1.1 * T)
    assert 0 not in [fault.member for fault in debts.at_fault(1.1 * T)]
    debts.told_carried(Edge(0, 2), 2, 1.2 * T)
    debts.told_part(0, 2, 2, 1.2 * T)
    assert debts._totals[1].moved == 100.0, "what the mate had is the mate's"


def test_an_author_is_to_be_half_as_fast_through_a_mate_and_the_mate_is_not_to_be_faster_for_it() -> None:
    debts = Debts([0, 900, 1800], 9, T, T)
    assert [debts.assumed(0, 1), debts.assumed(0, 2), debts.assumed(2, 1)] == [100.0, 200.0, 300.0]
    debts.carry(Edge(0, 1), 2, 1.0)
    assert [debts.assumed(0, 2), debts.assumed(2, 1)] == [250.0, 300.0]


# Whom an edge puts out

edges = st.frozensets(st.builds(Edge, st.integers(0, 5), st.integers(0, 5)).filter(lambda edge: edge.source != edge.target), max_size=12)


def test_who_has_edges_to_most_others_is_left_out() -> None:
    assert whom_to_leave_out([Edge(0, 1)], [Edge(0, 1), Edge(0, 2)], [0, 1]) == 0
    assert whom_to_leave_out([Edge(0, 1)], [Edge(0, 1), Edge(2, 1)], [0, 1]) == 1
    assert whom_to_leave_out([Edge(0, 1)], [Edge(0, 1), Edge(1, 0), Edge(0, 1)], [1]) == 1
    assert whom_to_leave_out([Edge(0, 1)], [Edge(0, 1)], [0, 1]) == 0


@given(edges, st.integers(0, 5), st.integers(0, 5))
def test_no_word_of_one_member_alone_puts_out_another_one(others: frozenset[Edge], liar: int, victim: int) -> None:
    """It can add edges of its own only, and each adds as much to it as to the other end."""
    if liar == victim:
        return
    honest = frozenset(edge for edge in others if victim not in edge and liar not in edge)
    for edge in (Edge(victim, liar), Edge(liar, victim)):
        assert whom_to_leave_out([edge], honest | {edge}, [liar]) == liar


def test_a_judge_names_anybody_but_itself_and_of_two_the_other_one() -> None:
    assert [named_by(0, worst, 2, 3) for worst in range(3)] == [None, 1, 2]
    assert [named_by(0, worst, 1, 2) for worst in range(2)] == [1, 1]
    assert named_by(0, 1, 0, 2) is None, "it is at fault itself: the other one judges"


def test_edges_of_the_last_ten_steps_count() -> None:
    past, peers = PastEdges(), [PeerId("a"), PeerId("b"), PeerId("c")]
    past.end_step([(PeerId("c"), PeerId("a")), (PeerId("gone"), PeerId("a"))])
    for _ in range(9):
        past.end_step([])
    assert past.among(peers) == {Edge(2, 0)}
    past.end_step([])
    assert past.among(peers) == frozenset()


def test_a_mate_that_has_edges_to_neither_end_carries() -> None:
    assert mate_for(Edge(0, 1), [Edge(0, 1)], [3, 2, 1, 0]) == 3
    assert mate_for(Edge(0, 1), [Edge(0, 3), Edge(0, 1)], [3, 2, 1, 0]) == 2
    assert mate_for(Edge(0, 1), [Edge(0, 3), Edge(2, 1)], [3, 2, 1, 0]) is None
    assert mate_for(Edge(0, 1), [], [3, 2, 1, 0], tried=[3]) == 2


# What a proposal assumes


@given(rates, st.floats(0.01, 100.0))
def test_a_round_that_is_proposed_takes_no_longer_than_it_may(ups: list[float], within_s: float) -> None:
    downs, codec_bytes = [10 * up for up in ups], [8.0, 2.0, 1.0]
    fitted = fit(ups, downs, codec_bytes, within_s)
    assert fitted.expected_s <= within_s
    assert sum(fitted.shares) == pytest.approx(1.0 if max(fitted.codecs) >= 0 else 0.0)
    for up, codec, share in zip(ups, fitted.codecs, fitted.shares, strict=True):
        assert codec >= 0 or share == 0
        if codec >= 0 and len(fitted.codecs) - fitted.codecs.count(-1) > 1:
            assert codec_bytes[codec] / up <= within_s * (1 + 1e-9)


def test_the_codecs_of_hundreds_of_members_take_little_time() -> None:
    """A third of the lines is as slow down as up; the slowest can not send in time in any codec."""
    ups = [1e5 + 3e4 * number for number in range(300)]
    downs, codec_bytes = [up * (1, 5, 10)[number % 3] for number, up in enumerate(ups)], [4e8, 2e8, 1e8, 5e7, 2e7]
    for within_s in (1e-9, 10.0, 100.0):
        began_s = time.thread_time()
        fitted = fit(ups, downs, codec_bytes, within_s)
        assert time.thread_time() - began_s < 0.1
        assert fitted.expected_s <= within_s
        assert all(codec < 0 for up, codec in zip(ups, fitted.codecs, strict=True) if 2e7 / up > within_s)


def test_the_slowest_takes_another_codec_and_who_is_slower_still_is_left_out() -> None:
    ups, downs = [rate * MBIT for rate in (1, 5, 20, 100)], [100 * MBIT] * 4
    fitted = fit(ups, downs, [64e6, 16e6, 8e6], 30.0)
    assert fitted.codecs == (-1, 1, 0, 0)
    assert fit(ups, downs, [64e6], 600.0).codecs == (0, 0, 0, 0)
    assert fit(ups, [*downs[:3], 1 * MBIT], [64e6], 300.0).codecs == (-1, 0, 0, -1), "the first one is too slow up, the last one down"


def test_a_claimed_rate_counts_as_far_as_it_was_measured() -> None:
    assert (believed(10.0, None), believed(10.0, 4.0), believed(10.0, 40.0)) == (10.0, 4.0, 10.0)


def test_a_round_may_take_an_averaging_time_or_a_share_of_a_long_step() -> None:
    assert (most_s(T, 0.25, 8.0), most_s(T, 0.25, 600.0)) == (T, 150.0)


HOME = 20 * MBIT


def allowed_s(num_bytes: float, rates: list[float]) -> tuple[float, float]:
    """What is expected of a round with these uplinks, and how long it may take."""
    expected_s = exchange_s(num_bytes, rates, shares_by_rate(rates))
    return expected_s, assumed_s(expected_s, usual_s(num_bytes, rates, HOME), T)


def test_lines_as_unlike_as_those_of_homes_have_all_the_time_that_they_need() -> None:
    for ups in ([5, 20, 20, 100], [5, 5], [1, 20, 20], [2, 2, 2, 2], [5, 10_000]):
        expected_s, most = allowed_s(64e6, [up * MBIT for up in ups])
        assert most > expected_s, ups


@pytest.mark.parametrize("told", [200.0, HOME])
def test_a_member_that_moves_hardly_anything_is_left_out_also_where_it_says_so(told: float) -> None:
    """What rounds take would be expected of the next ones, and a fortieth of that would be allowed there."""
    believed_of, num_bytes, lines = told, 8e6, [HomeLink(HOME, HOME)] * 3
    for _ in range(4):
        rates = [HOME, HOME, believed_of]
        shares = shares_by_rate(rates)
        expected_s, most = allowed_s(num_bytes, rates)
        assert most <= max(T, SLOWDOWN * usual_s(num_bytes, [HOME] * 3, HOME))
        moves = min(believed_of, HOME) / (1.8 * SLOWDOWN)
        slice_bytes = [round(share * num_bytes) for share in shares]
        plan = RoundPlan(
            slice_bytes=slice_bytes, num_chunks=num_chunks(slice_bytes, expected_s, T), within_s=most, averaging_s=T, turns=range(3)
        )
        end = simulate(plan, RoundLinks(lines=[*lines[:2], HomeLink(moves, HOME)], delay_s=[[0.0] * 3] * 3), most_s=1e6)
        assert end.ended_s < 2 * SLOWDOWN * max(T, usual_s(num_bytes, [HOME] * 3, HOME))
        if not end.is_done:
            assert (end.left_out, end.ended_s < 4 * T) == (2, True)
            return
        believed_of = moves
    pytest.fail("it is never left out")


def test_members_propose_in_turn_two_averaging_times_apart() -> None:
    assert [turn_after_s(rank, T) for rank in range(3)] == [0.0, 18.0, 36.0]


# Chunks and lines


@given(st.integers(0, 10**9), st.integers(1, 300))
def test_the_chunks_of_a_slice_are_the_slice(slice_bytes: int, number: int) -> None:
    chunks = [chunk_bytes(slice_bytes, number, each) for each in range(number)]
    assert sum(chunks) == slice_bytes
    assert max(chunks) - min(chunks) <= 1


def test_chunks_are_small_enough_for_the_rates_and_no_larger_than_half_a_mebibyte() -> None:
    assert num_chunks([1000, 200_000], 0.2 * T, T) == 12
    assert num_chunks([1000, 20_000_000], 2 * T, T) == 180
    assert num_chunks([1000, 2000], 0.2 * T, T) == 1
    assert num_chunks([1000, 64 << 20], 0.01 * T, T) == 128


@pytest.mark.parametrize("num_members", [2, 4, 8])
def test_a_row_takes_a_tenth_of_a_second_on_an_uplink_and_half_a_second_where_packets_are_lost(num_members: int) -> None:
    rate, num_bytes = 2_500_000.0, 64_000_000
    slices = [num_bytes // num_members] * num_members
    expected_s = 2 * num_bytes * (1 - 1 / num_members) / rate
    row_bytes = 2 * (num_members - 1) * slices[0] / num_chunks(slices, expected_s, 100 * T)
    assert row_bytes / rate == pytest.approx(ROW_S, rel=0.05)
    slow = rate / 5
    row_bytes = 2 * (num_members - 1) * slices[0] / num_chunks(slices, 5 * expected_s, T, is_lossy=True)
    assert row_bytes / slow == pytest.approx(LOSSY_ROW_S, rel=0.05)


def flow(to: int, number: int, limit: int, hop: int = 1, broke: int = 0) -> Flow:
    return Flow(to=to, slice=to, of=9, turn=to, hop=hop, next=number, limit=limit, broke=broke)


def test_the_lowest_chunk_number_goes_first_and_reducers_take_turns_within_it() -> None:
    assert next_flow([]) is None
    assert next_flow([flow(1, 2, 4), flow(2, 1, 4), flow(3, 1, 4)]) == flow(2, 1, 4)
    assert next_flow([flow(1, 4, 4), flow(2, 3, 4, hop=-1), flow(3, 3, 4)]) == flow(3, 3, 4)
    assert next_flow([flow(1, 0, 4, broke=2), flow(2, 1, 4)]) == flow(2, 1, 4)


def test_a_member_sends_its_own_before_what_it_carries() -> None:
    carried = Flow(to=1, slice=1, of=9, turn=AFTER_OWN, hop=1, next=0, limit=4)
    assert next_flow([carried, flow(2, 3, 4)]) == flow(2, 3, 4)
    assert next_flow([carried, flow(2, 4, 4)]) == carried


def test_a_line_that_changes_its_rate_passes_what_it_can() -> None:
    line = Line(10.0, [(5.0, 0.1), (20.0, 2.0)])
    assert line.end_s(0.0, 50.0) == 5.0
    assert line.end_s(0.0, 55.0) == 10.0
    assert line.end_s(0.0, 85.0) == pytest.approx(21.0)
    assert line.end_s(30.0, 20.0) == pytest.approx(31.0)


def test_a_break_cuts_off_a_member_or_two_from_each_other() -> None:
    assert [LinkBreak(0.0, 1.0, 0).cuts(*pair) for pair in ((0, 1), (2, 0), (1, 2))] == [True, True, False]
    assert [LinkBreak(0.0, 1.0, 0, 2).cuts(*pair) for pair in ((0, 1), (2, 0), (0, 2))] == [False, True, True]


def test_where_all_members_are_slower_than_assumed_nobody_is_too_slow() -> None:
    """The rates that the proposal believed were old: 47 times what the lines carry."""
    debts, chunks = Debts([320, 320], 320, T, T), 0
    for tick in range(1, 80):
        now_s = tick * T / 8
        chunks += tick % 2
        for one, other in ((0, 1), (1, 0)):
            debts.heard(one, now_s)
            debts.told_part(one, other, chunks, now_s)
            debts.told_sum(one, other, chunks, now_s)
        debts.look(now_s)
        assert debts.at_fault(now_s) == []
