"""Rule 21 (prove): which downloaded states a joiner takes, by what its mates hold."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.proving import (
    MOST_APART,
    MOST_ASKED,
    TIMES_APART,
    TOLERANCE,
    Acceptance,
    Distance,
    Opinion,
    Proof,
    StateVerdict,
    verdict,
)
from peerd.table.record import PeerId, PeerRecord

FALSE = 0.1


def on_a_line(places: Mapping[str | None, float]) -> Distance:
    """States as numbers: this joiner's own is that of None."""
    return lambda one, other: 0.0 if places[one] == places[other] else abs(places[one] - places[other])


def peers(num: int) -> list[PeerId]:
    return [PeerId(f"m{number}") for number in range(num)]


@given(st.integers(3, 16), st.data())
def test_a_made_up_state_is_never_taken_and_a_right_one_always_while_fewer_than_half_lie(num: int, data: st.DataObject) -> None:
    """Whatever the liars say that they hold, and however unlike the devices of honest mates round."""
    asked = peers(num)
    num_liars = data.draw(st.integers(0, (num - 1) // 2))
    noise = data.draw(st.sampled_from([0.0, 1e-7, TOLERANCE / 2]))
    honest: dict[str | None, float] = {peer: data.draw(st.floats(-noise, noise)) for peer in asked[num_liars:]}
    false = data.draw(st.sampled_from([FALSE, -1.0, 1e30, float("inf")]))
    lies: dict[str | None, float] = {peer: data.draw(st.sampled_from([false, 0.0, 2 * false])) for peer in asked[:num_liars]}
    right: dict[str | None, float] = {**honest, **lies, asked[-1]: 0.0, None: 0.0}  # the giver's is this joiner's to the bit
    assert verdict(asked, num, on_a_line(right)) is StateVerdict.RIGHT
    assert verdict(asked, num, on_a_line({**right, **lies, **honest, None: false})) is StateVerdict.WRONG


def test_nothing_is_decided_before_more_than_half_have_answered_alike() -> None:
    liar, *honest = peers(3)
    places: dict[str | None, float] = {liar: FALSE, honest[0]: 0.0, honest[1]: 0.0, None: FALSE}
    assert verdict([liar], 3, on_a_line(places)) is StateVerdict.OPEN
    assert verdict([liar, honest[0]], 3, on_a_line(places)) is StateVerdict.OPEN
    assert verdict([liar, *honest], 3, on_a_line(places)) is StateVerdict.WRONG
    assert verdict(honest, 3, on_a_line({**places, None: 0.0})) is StateVerdict.RIGHT, "the third need not answer"


def test_of_two_mates_with_unlike_states_nobody_can_say_which_is_right() -> None:
    one, other = peers(2)
    assert verdict([one, other], 2, on_a_line({one: 0.0, other: FALSE, None: 0.0})) is StateVerdict.DISPUTED


@pytest.mark.parametrize("apart", [TOLERANCE / 2, MOST_APART / 2])
def test_two_mates_on_unlike_devices_hold_one_state(apart: float) -> None:
    one, other = peers(2)
    assert verdict([one, other], 2, on_a_line({one: 0.0, other: apart, None: 0.0})) is StateVerdict.RIGHT


def test_a_giver_on_a_device_unlike_those_of_most_is_left_for_one_of_these_if_they_are_further_apart_than_usual() -> None:
    """Nobody is blamed for that: the joiner asks another donor."""
    giver, *others = peers(3)
    places: dict[str | None, float] = {giver: 0.0, None: 0.0, **dict.fromkeys(others, 2 * TOLERANCE)}
    assert verdict([giver, *others], 3, on_a_line(places)) is StateVerdict.WRONG


def test_a_state_that_is_further_off_than_rounding_explains_is_not_taken() -> None:
    liar, *honest = peers(3)
    spread = TOLERANCE
    places: dict[str | None, float] = {honest[0]: 0.0, honest[1]: spread}
    for off, expected in ((3.9 * spread, StateVerdict.RIGHT), ((TIMES_APART + 1.1) * spread, StateVerdict.WRONG)):
        assert verdict([liar, *honest], 3, on_a_line({**places, liar: off, None: off})) is expected


def mates(num: int, step: int = 5) -> list[PeerRecord]:
    return [PeerRecord(peer=peer, incarnation=1, stage=0, step=step) for peer in peers(num)]


def test_one_that_is_mute_keeps_nobody_out_for_long() -> None:
    giver, mute = mates(2)
    proof = Proof([giver.peer], b"seed", 100.0, 5.0)
    same = on_a_line({giver.peer: 0.0, None: 0.0})
    assert proof.judge([giver, mute], set(), set(), same, 109.0) is StateVerdict.OPEN
    assert proof.judge([giver, mute], set(), set(), same, 110.0) is StateVerdict.RIGHT


def test_hole_74_one_that_tells_later_is_not_mute_and_counts_for_longer_where_states_are_large() -> None:
    giver, *others = mates(3)
    proof, busy = Proof([giver.peer], b"seed", 100.0, 5.0), {mate.peer for mate in others}
    made_up = on_a_line({giver.peer: FALSE, None: FALSE, **dict.fromkeys(busy, 0.0)})
    for now_s in (109.0, 110.0, 170.0):
        assert proof.judge([giver, *others], set(), set(), made_up, now_s, busy) is StateVerdict.OPEN
    assert proof.judge([giver, *others], busy, set(), made_up, 170.0) is StateVerdict.WRONG
    for took_s, until_s in ((0.1, 180.0), (3.0, 340.0)):
        proof.sketched(took_s)
        assert proof.judge([giver, *others], set(), set(), made_up, until_s - 1, busy) is StateVerdict.OPEN
        assert proof.judge([giver, *others], set(), set(), made_up, until_s, busy) is StateVerdict.RIGHT, "they keep nobody out for ever"


def test_a_state_that_is_ahead_of_the_mates_for_long_is_not_that_of_the_stage() -> None:
    giver, *others = mates(3)
    proof = Proof([giver.peer], b"seed", 100.0, 5.0)
    same, behind = on_a_line({giver.peer: 0.0, None: 0.0}), {mate.peer for mate in others}
    assert proof.judge([giver, *others], set(), behind, same, 109.0) is StateVerdict.OPEN
    assert proof.judge([giver, *others], set(), behind, same, 110.0) is StateVerdict.WRONG


def test_where_nobody_is_left_to_ask_the_state_is_taken() -> None:
    assert Proof([PeerId("gone")], b"seed", 100.0, 5.0).judge([], set(), set(), on_a_line({None: 0.0}), 100.0) is StateVerdict.RIGHT


def test_a_large_stage_is_asked_in_part_and_each_joiner_draws_others() -> None:
    drawn = [Proof([], bytes([number]), 0.0, 5.0).asked(mates(100)) for number in range(2)]
    assert [len(each) for each in drawn] == [MOST_ASKED, MOST_ASKED]
    assert drawn[0] != drawn[1]


RIGHT, WRONG, OPEN, DISPUTED = (Opinion(each, 3, frozenset({PeerId("a")})) for each in StateVerdict)


def why_not(acceptance: Acceptance, *opinions: Opinion, apart: str = "", is_last: bool = False) -> str:
    return acceptance.why_not(opinions, apart, is_last=is_last)


def test_an_export_takes_what_most_hold_and_what_nobody_can_judge_and_never_what_most_contradict() -> None:
    acceptance = Acceptance()
    assert why_not(acceptance, RIGHT, Opinion(), DISPUTED) == ""
    assert why_not(acceptance, RIGHT, apart="caught at different steps") == "caught at different steps"
    for is_last in (False, True):
        told = why_not(acceptance, WRONG, RIGHT, Opinion(StateVerdict.WRONG), OPEN, apart="caught at different steps", is_last=is_last)
        assert told == (
            "most peers of stage 0 hold another state than a gave; most peers of stage 2 hold another state than its donor gave"
        ), "why it is false comes before all else"


def test_where_too_few_could_be_asked_an_export_tries_once_more_unless_its_time_is_up() -> None:
    acceptance = Acceptance()
    assert why_not(acceptance, RIGHT, OPEN, apart="caught at different steps")
    assert why_not(acceptance, RIGHT, OPEN) == "too few peers of stage 1 told in time what they hold", "that they were apart was no try"
    assert why_not(acceptance, RIGHT, OPEN) == ""
    assert why_not(Acceptance(), OPEN, is_last=True) == ""


def test_after_a_false_state_an_export_tries_until_enough_could_be_asked() -> None:
    acceptance = Acceptance()
    assert why_not(acceptance, WRONG)
    for _ in range(5):
        assert why_not(acceptance, OPEN, is_last=True)
    assert why_not(acceptance, RIGHT) == ""


@pytest.mark.parametrize(
    ("opinion", "why"),
    [
        (Opinion(), ""),
        (Opinion(StateVerdict.RIGHT, 2), ""),
        (Opinion(StateVerdict.RIGHT, 1), "only one peer serves stage 4, so nobody else could confirm its state"),
        (Opinion(StateVerdict.WRONG, 3, frozenset({PeerId("b"), PeerId("a")})), "most peers of stage 4 hold another state than a, b gave"),
        (DISPUTED, "the peers of stage 4 hold unlike states, and more than half hold none of them"),
        (OPEN, "too few peers of stage 4 told in time what they hold"),
    ],
)
def test_an_export_says_why_a_state_is_not_proven(opinion: Opinion, why: str) -> None:
    assert opinion.why_unproven(4) == why
