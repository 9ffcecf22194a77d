"""Hole 74 (many sketches): who asks for sketches all the time leaves others their turns."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.sketching import LATE_S, MAKING_S, NEXT_S, PAUSE, SketchTurns
from peerd.table.record import PeerId

LIARS, JOINER = [PeerId(f"liar {number}") for number in range(4)], PeerId("joiner")


@given(st.integers(1, 4), st.floats(0.001, 5.0), st.floats(0.001, 2.9))
def test_hole_74_each_of_those_that_ask_gets_a_sketch_in_its_turn(num_liars: int, took_s: float, late_s: float) -> None:
    """The liars ask at every moment. The joiner asks at once after a sketch, and else somewhat later than it was told."""
    turns, now_s, asks_s, made_s, mine, others = SketchTurns(), 0.0, 0.0, math.inf, 0, 0
    while mine < 3 and others < 20:
        if now_s >= made_s:
            turns.took(took_s, now_s)
            made_s = math.inf
        askers = [*LIARS[:num_liars], *([JOINER] if now_s >= asks_s else [])]
        for asker in askers:
            if wait_s := turns.wait_s(asker, now_s):
                asks_s = now_s + wait_s + late_s if asker == JOINER else asks_s
                continue
            turns.begins()
            made_s = now_s + took_s
            mine, others = mine + (asker == JOINER), others + (asker != JOINER)
        now_s += 0.05
    assert mine == 3
    assert others <= (mine + 1) * num_liars


def test_sketches_take_a_small_share_of_the_time_and_who_does_not_come_back_loses_its_place() -> None:
    turns = SketchTurns()
    assert turns.wait_s(JOINER, 0.0) == 0.0
    turns.begins()
    assert turns.wait_s(LIARS[0], 60.0) == MAKING_S
    turns.took(0.5, 61.0)
    assert turns.wait_s(JOINER, 61.0) == 0.5 * PAUSE
    assert turns.wait_s(LIARS[0], 61.5) == 0.5 * PAUSE - 0.5
    due_s = 61.0 + 0.5 * PAUSE
    assert turns.wait_s(JOINER, due_s) == NEXT_S  # another one asked before it
    late_s = due_s + LATE_S + 0.5 * PAUSE
    assert turns.wait_s(JOINER, late_s) == NEXT_S
    assert turns.wait_s(JOINER, late_s + 0.1) == 0.0
