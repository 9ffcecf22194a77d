"""How long a microbatch takes: known early where it is long, and the one under way counts once it takes much longer than usual."""

from __future__ import annotations

from peerd.stage.computing import MOST_UNUSUAL, Computing, Present
from peerd.stage.results import Ticket


def ticket(index: int = 0) -> Ticket:
    return Ticket(step=3, index=index, accept_mark=(1, 1), accumulate=True)


def compute(computing: Computing, took_s: float, number: int = 1) -> None:
    for index in range(number):
        each = ticket(index)
        computing.began(each, 0.0)
        computing.ended(each, took_s, is_whole=True)
        computing.done(each)


def test_short_microbatches_count_once_there_are_a_few_because_the_first_warms_up() -> None:
    computing = Computing()
    compute(computing, 4.0)
    assert computing.microbatch_s(0.0) == 0.0
    compute(computing, 0.5, number=2)
    assert computing.microbatch_s(0.0) == 0.5


def test_a_microbatch_of_minutes_is_known_as_soon_as_the_first_has_taken_long() -> None:
    """Others wait in terms of it: after three of minutes they would have waited too briefly three times."""
    computing, first = Computing(), ticket()
    computing.began(first, 100.0)
    assert computing.microbatch_s(104.0) == 0.0
    assert computing.microbatch_s(160.0) == 60.0, "so long at least"
    computing.ended(first, 60.0, is_whole=False)
    assert computing.microbatch_s(300.0) == 180.0, "a forward pass is a third of the work"
    computing.began(first, 300.0)
    computing.ended(first, 100.0, is_whole=False)
    computing.done(first)
    assert computing.microbatch_s(400.0) == 160.0


def test_what_is_under_way_is_told_with_the_time_that_it_has_taken_in_all() -> None:
    computing, one = Computing(), ticket(7)
    seen = [computing.present]
    computing.began(one, 100.0)
    computing.ended(one, 30.0, is_whole=False)
    seen.append(computing.present)
    computing.began(one, 200.0)
    assert [*seen, computing.present] == [None, None, Present(3, 7, since_s=170.0)]


def test_one_that_takes_much_longer_than_usual_counts_but_only_so_far() -> None:
    computing = Computing()
    compute(computing, 10.0, number=3)
    computing.began(ticket(), 0.0)
    assert [computing.microbatch_s(now_s) for now_s in (29.0, 31.0, 1e6)] == [10.0, 31.0, MOST_UNUSUAL * 10.0]
