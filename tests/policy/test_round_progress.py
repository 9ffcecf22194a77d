"""Rounds that last as long as their links need: drawn rounds, in which only a member that stops progressing is left out.

Of three members and more none but the faulty one is ever left out here. Of two nobody else can say which of them is at fault: those tests
say what becomes of them. Times of a round's end are told in averaging times, since the fault began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from peerd.policy.round.chunks import LEEWAY, num_chunks
from peerd.policy.round.debts import AtFault, Debts, Edge
from peerd.policy.round.links import HomeLink, LinkBreak, RateChange, RoundLinks
from peerd.policy.round.simulated import RoundEnd, RoundPlan, simulate
from peerd.policy.round.slices import bytes_each_way, least_exchange_s, shares_by_rate
from tests.policy.round_draws import AVERAGING_S, MBIT, Drawn, draw

EASY = (0.03,)
"""Links that could carry the round in a thirtieth of the time that its proposal allows."""
TIGHT = (1.0,)
LONGEST_S = 30 * AVERAGING_S


def rounds(number: int, least: int = 2, margins: tuple[float, ...] | None = None) -> Iterator[Drawn]:
    for seed in range(number):
        yield draw(seed, least) if margins is None else draw(seed, least, margins)


def run(drawn: Drawn, judge: type[Debts] = Debts, **faults: object) -> RoundEnd:
    return simulate(drawn.plan, drawn.with_links(**faults).links, LONGEST_S, judge)


def closed_without(end: RoundEnd, guilty: int, since_s: float, within: float, drawn: Drawn) -> bool:
    """Whether the round was closed so many averaging times after the fault began; False if it was done. Fails if anybody else is blamed."""
    assert end.is_done or end.left_out == guilty, (drawn.plan, drawn.links, end)
    took_s = end.ended_s - max(since_s, end.began_s)
    assert end.is_done or took_s <= within * AVERAGING_S, (drawn.plan, drawn.links, end)
    return not end.is_done


def test_no_honest_round_is_closed_and_nobody_is_blamed() -> None:
    for drawn in rounds(150):
        end = run(drawn)
        assert end.is_done, (drawn.plan, drawn.links, end)
        assert end.left_out == -1
        assert end.ended_s < 2 * drawn.plan.within_s + AVERAGING_S


def test_in_an_honest_round_each_member_sends_every_part_and_every_sum_once() -> None:
    for drawn in rounds(100, margins=EASY):
        num_bytes, end = sum(drawn.plan.slice_bytes), run(drawn)
        shares = [size / num_bytes for size in drawn.plan.slice_bytes]
        assert not end.carriers
        assert end.sent == pytest.approx([bytes_each_way(num_bytes, drawn.num_members, share) for share in shares])


def test_a_round_without_a_member_that_dies_is_closed_and_only_that_member_is_left_out() -> None:
    closed = 0
    for drawn in rounds(250):
        member, at_s = drawn.some_member(), drawn.some_time_s()
        closed += closed_without(run(drawn, killed_s={member: at_s}), member, at_s, 3, drawn)
    assert closed > 220


def test_a_member_that_sends_a_byte_a_second_is_left_out() -> None:
    closed = 0
    for drawn in rounds(250):
        member, at_s = drawn.some_member(), drawn.some_time_s()
        end = run(drawn, changes=[RateChange(at_s, member, up=1 / drawn.links.lines[member].up)])
        closed += closed_without(end, member, at_s, 3, drawn)
    assert closed > 220


def test_a_member_whose_chunks_all_break_at_their_ends_is_left_out() -> None:
    for drawn in rounds(80):
        member = drawn.some_member()
        assert closed_without(run(drawn, tears={member}), member, 0.0, 3, drawn)


def test_a_member_that_lives_and_sends_nothing_is_left_out() -> None:
    for drawn in rounds(150):
        member = drawn.some_member()
        assert closed_without(run(drawn, mute={member}), member, 0.0, 3, drawn)


def test_a_member_that_also_tells_of_no_edge_is_left_out_where_there_is_a_third_one() -> None:
    for drawn in rounds(150, least=3):
        member = drawn.some_member()
        assert closed_without(run(drawn, mute={member}, secretive={member}), member, 0.0, 3, drawn)


def test_of_two_the_one_that_tells_of_an_edge_alone_is_left_out() -> None:
    """Nobody else can say which of the two lies, and an accusation that costs its author puts out nobody else."""
    for drawn in rounds(150):
        if drawn.num_members == 2:
            assert run(drawn, mute={0}, secretive={0}).left_out == 1


def test_a_member_that_verifies_nothing_is_left_out_where_there_is_a_third_one() -> None:
    """Where it reduces nothing this shows only once the others have nothing left to send but its sums."""
    for drawn in rounds(40, least=3):
        member = drawn.some_member()
        within = 2 * drawn.plan.within_s / AVERAGING_S + 4
        assert closed_without(run(drawn, deaf={member}), member, 0.0, within, drawn)


def test_of_two_the_one_that_verifies_nothing_puts_out_the_other() -> None:
    """It looks the same as one that sends nothing, and there is nobody to ask, nor a mate to try."""
    for drawn in rounds(60):
        if drawn.num_members == 2:
            assert run(drawn, deaf={1}).left_out == 0


def test_where_the_leader_is_mute_the_next_one_proposes_after_two_averaging_times() -> None:
    for drawn in rounds(60):
        turns = drawn.plan.turns
        end = run(drawn, secretive={turns[0]})
        assert end.is_done
        assert end.began_s == 2 * AVERAGING_S
        if drawn.num_members > 2:
            assert run(drawn, secretive=set(turns[:2])).began_s == 4 * AVERAGING_S


def test_what_does_not_pass_one_way_goes_through_a_mate() -> None:
    carried = 0
    for drawn in rounds(80, least=3):
        pair = Edge(*drawn.some_pair())
        end = run(drawn, dead={pair})
        assert end.is_done, (drawn.plan, drawn.links, end)
        carried += pair in end.carriers
    assert carried > 55


def test_an_author_is_not_too_slow_where_its_mate_has_no_rate_to_spare() -> None:
    """Rounds of three in which the mate's line is as full as it may be with its own."""
    for seed in (1793, 2808):
        drawn = draw(seed, 3)
        pair = Edge(*drawn.some_pair())
        end = run(drawn, dead={pair})
        assert pair in end.carriers
        assert end.is_done, (drawn.plan, drawn.links, end)


def test_where_the_way_is_dead_and_there_is_no_mate_one_of_the_two_is_left_out() -> None:
    for drawn in rounds(100):
        if drawn.num_members == 2:
            end = run(drawn, dead={Edge(0, 1)})
            assert end.left_out == 0
            assert end.ended_s <= 3 * AVERAGING_S


def test_a_link_that_drops_to_a_twentieth_lengthens_the_round_and_nobody_is_left_out() -> None:
    for drawn in rounds(150, margins=EASY):
        member, at_s = drawn.some_member(), drawn.some_time_s()
        end = run(drawn, changes=[RateChange(at_s, member, up=0.05, down=0.05)])
        assert end.is_done, (drawn.plan, drawn.links, end)


@pytest.mark.parametrize("share", [0.2, 0.1])
def test_an_uplink_that_drops_to_a_fifth_of_what_its_round_needs_ends_it_also_where_mates_carry(share: float) -> None:
    """A round with such a member takes twice the time of its proposal at most: who moves half of what is assumed may stay."""
    closed = 0
    for drawn in rounds(200, margins=TIGHT):
        member, at_s = drawn.some_member(), drawn.some_time_s()
        end = run(drawn, changes=[RateChange(at_s, member, up=share)])
        closed += closed_without(end, member, at_s, 4, drawn)
        assert end.ended_s - at_s <= max(2 * drawn.plan.within_s, 3 * AVERAGING_S) + AVERAGING_S
    assert closed > 60


def test_of_two_whose_link_is_slow_both_ways_either_may_be_left_out() -> None:
    """What comes slowly may be held up by the one's uplink or by the other's downlink. Of three the one is slow with all others."""
    others = 0
    for drawn in rounds(200):
        member, at_s = drawn.some_member(), drawn.some_time_s()
        end = run(drawn, changes=[RateChange(at_s, member, up=0.05, down=0.05)])
        if not end.is_done and end.left_out != member:
            assert drawn.num_members == 2, (drawn.plan, drawn.links, end)
            others += 1
    assert others > 0


def test_a_break_of_ten_seconds_ends_no_round() -> None:
    for drawn in rounds(80):
        member, at_s = drawn.some_member(), drawn.some_time_s()
        end = run(drawn, breaks=[LinkBreak(at_s, at_s + 10.0, member)])
        assert end.is_done, (drawn.plan, drawn.links, end)


def test_a_break_of_ten_seconds_between_two_ends_no_round() -> None:
    for drawn in rounds(80):
        at_s = drawn.some_time_s()
        end = run(drawn, breaks=[LinkBreak(at_s, at_s + 10.0, *drawn.some_pair())])
        assert end.is_done, (drawn.plan, drawn.links, end)


# What a home gets


def home_round(ups: list[float], num_bytes: int, within_s: float) -> tuple[RoundPlan, RoundLinks]:
    """Peers with these uplinks in Mbit/s, 100 down and 60 ms apart."""
    lines, members = [HomeLink(up * MBIT, 100 * MBIT) for up in ups], range(len(ups))
    slices = [round(share * num_bytes) for share in shares_by_rate([line.up for line in lines])]
    chunks = num_chunks(slices, within_s / LEEWAY, AVERAGING_S)
    plan = RoundPlan(slice_bytes=slices, num_chunks=chunks, within_s=within_s, averaging_s=AVERAGING_S, turns=members)
    return plan, RoundLinks(lines=lines, delay_s=[[0.03 for _ in members] for _ in members])


@pytest.mark.parametrize("ups", [[20.0, 20.0], [20.0] * 4, [5.0] * 4, [5.0, 20.0, 20.0, 100.0], [20.0] * 16])
def test_a_round_of_a_large_stage_takes_hardly_longer_than_its_bytes(ups: list[float]) -> None:
    bound_s = least_exchange_s(64e6, [up * MBIT for up in ups])
    end = simulate(*home_round(ups, 64_000_000, bound_s))
    assert end.is_done
    assert end.ended_s <= 1.1 * bound_s


# A rule switched off: the check notices


class EachReceiverBlames(Debts):
    """The naive wording: who has not sent everything owes, and is at fault once one receiver had nothing of it for an averaging time."""

    def owes(self, source: int, target: int) -> bool:
        is_unfinished = self.parts[source][target] < self.sizes[target] or self.sums[source][target] < self.sizes[source]
        return source != target and is_unfinished

    def at_fault(self, now_s: float, later: float = 0.0) -> list[AtFault]:
        late_s = (1.0 + later) * self._averaging_s
        found = [edge for member in self.members for edge in self.owed_by(member)]
        return [AtFault(i, "nothing came") for i, k in found if self._edges[i][k].still_s(now_s) >= late_s]


class AnyByteIsProgress(Debts):
    """The naive wording: a round goes on as long as anything comes of its members."""

    def heard(self, member: int, now_s: float) -> None:
        super().heard(member, now_s)
        self._totals[member].move(0, now_s)

    def _is_slow(self, member: int, over_s: float, now_s: float) -> bool:
        return False


class AnyRateWillDo(Debts):
    """Chunks have to come, but no rate is assumed."""

    def _is_slow(self, member: int, over_s: float, now_s: float) -> bool:
        return False


def test_if_each_receiver_blamed_whoever_has_not_sent_everything_most_long_rounds_would_be_closed() -> None:
    """With chunks as large as they may be: in small ones something comes of each member all the time."""
    counts: Counter[bool] = Counter()
    for drawn in rounds(60, least=3, margins=TIGHT):
        if drawn.bound_s > 20:
            plan = replace(drawn.plan, num_chunks=4)
            counts[simulate(plan, drawn.links, LONGEST_S, EachReceiverBlames).is_done] += 1
    assert counts[False] > counts[True]


@pytest.mark.parametrize(
    ("naive", "rate_of"),
    [(AnyByteIsProgress, lambda drawn: 1.0), (AnyRateWillDo, lambda drawn: largest_chunk(drawn) / (0.8 * AVERAGING_S))],
)
def test_if_any_progress_would_do_one_member_would_hold_its_stage(naive: type[Debts], rate_of: Callable[[Drawn], float]) -> None:
    held = 0
    for drawn in rounds(40, margins=TIGHT):
        member = drawn.some_member()
        trickles = [RateChange(0.0, member, up=rate_of(drawn) / drawn.links.lines[member].up)]
        held += run(drawn, naive, changes=trickles).ended_s > 5 * drawn.plan.within_s
        end = run(drawn, changes=trickles)
        assert end.is_done or (end.left_out == member and end.ended_s <= 4 * AVERAGING_S)
    assert held > 12


def largest_chunk(drawn: Drawn) -> float:
    return max(drawn.plan.slice_bytes) / drawn.plan.num_chunks
