"""A microbatch that is not finite is tried ever more seldom; a run has diverged where trainers agree, and until its step is over."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.route.diverging import FIRST_PAUSE_S, MOST_PAUSE_S, TRIES, Diverging
from peerd.policy.route.launching import Standstill
from peerd.policy.step.diverged import diverged_step
from peerd.policy.step.ledger import full, indices
from tests.strategies import member, view_of

NUMBER = 4


def missing(*done: int) -> Standstill:
    return Standstill(7, full(NUMBER) & ~sum(1 << index for index in done))


def due(diverging: Diverging, now_s: float, *done: int) -> list[int]:
    still = missing(*done)
    return [*indices(still.absent & ~diverging.held_back(7, still, NUMBER, now_s))]


def test_without_a_failure_all_is_due() -> None:
    assert due(Diverging(), 0.0) == [0, 1, 2, 3]


def test_one_that_failed_is_tried_after_twice_the_pause_each_time() -> None:
    diverging, now_s, pauses = Diverging(), 0.0, []
    for _ in range(14):
        diverging.failed((7, 1), now_s)
        began_s = now_s
        while 1 not in due(diverging, now_s, 0):
            now_s += FIRST_PAUSE_S
        pauses.append(now_s - began_s)
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == MOST_PAUSE_S


def test_while_nothing_of_the_step_is_done_only_what_failed_is_tried() -> None:
    diverging = Diverging()
    diverging.failed((7, 2), 0.0)
    assert due(diverging, 0.5) == []
    assert due(diverging, 1.0) == [2]
    assert due(diverging, 0.5, 0) == [1, 3], "another microbatch of the step is done"


def test_after_some_tries_the_step_is_told_until_the_microbatch_is_there() -> None:
    diverging = Diverging()
    for number in range(TRIES):
        assert diverging.step(missing()) is None
        diverging.failed((7, 2), float(number))
    assert diverging.step(missing()) == 7
    assert diverging.step(missing(2)) is None, "another trainer's was finite"
    diverging.succeeded((7, 2))
    assert diverging.step(missing()) is None
    diverging.failed((7, 2), 0.0)
    diverging.begin(9)
    assert due(diverging, 0.0) == [0, 1, 2, 3]


def test_a_run_has_diverged_where_at_least_half_of_its_trainers_say_so_of_the_step_at_hand() -> None:
    one, two, three = (member(name, stage=index % 2, step=5, trains=True) for index, name in enumerate("abc"))
    silent = member("d", stage=1, step=5)
    assert diverged_step(view_of(one, two, silent), 2) is None
    assert diverged_step(view_of(replace(one, diverged_at=5), two, silent), 2) == 5
    assert diverged_step(view_of(replace(one, diverged_at=5), two, three), 2) is None, "one peer alone proves nothing"
    assert diverged_step(view_of(replace(one, diverged_at=5), replace(two, diverged_at=5), three), 2) == 5
    assert diverged_step(view_of(replace(one, diverged_at=4), two, silent), 2) is None, "that step is over"
    assert diverged_step(view_of(one, two, replace(silent, diverged_at=5)), 2) is None, "it does not train"
