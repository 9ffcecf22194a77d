"""Gradients kept for whoever does an earlier stage's part again: bounded, and never another's."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.codec import NONE, parse_codec
from peerd.stage.checks import Checks
from peerd.stage.finished import Finished, FinishedGradients
from peerd.stage.leaving import Leaving
from peerd.wire.chunks import digest_of
from peerd.wire.messages import Call, TensorBytes

BFLOAT16 = parse_codec("bfloat16")


def gradient_of(num_values: int) -> Leaving:
    leaving = Leaving(NONE)
    leaving.send(torch.zeros(num_values), Checks())
    return leaving


def finished_of(num_values: int, generation: int = 0) -> Finished:
    return Finished(gradient_of(num_values), b"inputs", generation)


def call(step: int = 0, index: int = 0, accumulate: frozenset[int] = frozenset({0}), evaluation: bool = False) -> Call:
    none = TensorBytes("float32", (0,), ())
    return Call(call_id=bytes(16), stage=1, step=step, index=index, accumulate=accumulate, inputs=none, labels=none, evaluation=evaluation)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 40))))
def test_no_more_is_kept_than_there_is_room_for_and_of_each_the_last(puts: list[tuple[int, int, int]]) -> None:
    finished = FinishedGradients(most_bytes=400)
    for step, index, num_values in puts:
        last = finished_of(num_values)
        finished.put(step, index, last, oldest_step=0)
        assert finished.find(call(step, index), NONE, 0) is last, "the last always has room: it is no larger"
        found = [finished.find(call(step, index), NONE, 0) for step in range(4) for index in range(8)]
        assert sum(each.gradient.num_bytes for each in found if each) == finished.num_bytes <= 400


def test_one_that_is_larger_than_all_room_is_not_kept() -> None:
    finished = FinishedGradients(most_bytes=400)
    finished.put(0, 0, finished_of(101), oldest_step=0)
    assert finished.find(call(), NONE, 0) is None
    assert finished.num_bytes == 0


def test_only_what_the_call_asks_for_is_given() -> None:
    finished = FinishedGradients()
    kept = finished_of(2, generation=1)
    finished.put(3, 5, kept, oldest_step=2)
    assert finished.find(call(3, 5), NONE, 1) is kept
    assert finished.find(call(3, 4), NONE, 1) is None
    assert finished.find(call(2, 5), NONE, 1) is None
    assert finished.find(call(3, 5), BFLOAT16, 1) is None, "it was sent in another form"
    assert finished.find(call(3, 5), NONE, 2) is None, "the parameters are another's since"
    assert finished.find(call(3, 5, evaluation=True), NONE, 1) is None
    for lacking in (frozenset({0, 1}), frozenset({1}), frozenset({2}), frozenset[int]()):
        assert finished.find(call(3, 5, lacking), NONE, 1) is None, "there is more to do than to give a gradient"


def test_what_is_of_steps_that_are_over_or_of_other_parameters_goes() -> None:
    finished = FinishedGradients()
    for step in range(5):
        finished.put(step, 0, finished_of(1), oldest_step=step - 1)
    assert [step for step in range(5) if finished.find(call(step, 0), NONE, 0)] == [3, 4]
    finished.put(4, 1, finished_of(1, generation=1), oldest_step=0)
    assert finished.num_bytes == gradient_of(1).num_bytes


@given(st.lists(st.binary(max_size=20)), st.lists(st.binary(max_size=20)))
def test_a_digest_tells_bytes_apart_however_they_are_cut(ones: list[bytes], others: list[bytes]) -> None:
    assert (digest_of(ones) == digest_of(others)) == (b"".join(ones) == b"".join(others))
    assert digest_of([b"".join(ones)]) == digest_of(ones)
