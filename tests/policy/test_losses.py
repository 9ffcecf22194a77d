"""The loss of a step is what most of the last stage tell, and one of them changes nothing."""

from __future__ import annotations

import pytest

from peerd.policy.step.losses import loss_of, newest_loss, told_losses
from peerd.table.record import PeerId
from tests.strategies import member, view_of

NUM_STAGES = 2


def last(name: str, step: int, loss: float | None) -> object:
    return member(name, stage=1, step=step, last_loss=loss)


@pytest.mark.parametrize(("step", "loss"), [(5, 1e30), (5, 0.0), (6, 1e30), (9, 0.0), (1, 7.0)])
def test_one_peer_that_tells_a_false_loss_changes_nothing(step: int, loss: float) -> None:
    """Before, the loss of the peer at the newest step was shown, and the largest one there."""
    honest = [last(name, 5, 2.5) for name in "abc"]
    view = view_of(*honest, last("liar", step, loss), member("first", stage=0, step=5, last_loss=99.0))  # type: ignore[arg-type]
    assert newest_loss(view, NUM_STAGES) == 2.5


@pytest.mark.parametrize("loss", [0.0, 2.4, 1e30])
def test_a_liar_that_tells_a_step_before_most_have_ended_it_changes_nothing(loss: float) -> None:
    """One that tells less than the first honest peer was believed: of two that had told, the smaller loss was shown and remembered."""
    told = {PeerId("liar"): loss, PeerId("a"): 2.5}
    assert loss_of(told, 3) is None
    assert loss_of({**told, PeerId("b"): 2.5}, 3) == 2.5
    view = view_of(last("liar", 6, loss), last("a", 6, 2.5), last("b", 5, 2.6))  # type: ignore[arg-type]
    assert newest_loss(view, NUM_STAGES) in (2.5, 2.6)


def test_a_step_that_half_of_the_stage_have_not_ended_is_not_shown_yet() -> None:
    view = view_of(last("a", 6, 2.0), last("b", 5, 2.5), last("c", 5, 2.5))  # type: ignore[arg-type]
    assert newest_loss(view, NUM_STAGES) == 2.5
    assert newest_loss(view_of(last("a", 0, None)), NUM_STAGES) is None  # type: ignore[arg-type]


def test_the_loss_of_a_step_is_known_once_most_have_told_it() -> None:
    view = view_of(last("a", 6, 2.0), last("b", 6, 2.0), last("c", 5, 2.5))  # type: ignore[arg-type]
    told = told_losses(view, NUM_STAGES)
    assert told == {5: {PeerId("a"): 2.0, PeerId("b"): 2.0}, 4: {PeerId("c"): 2.5}}
    assert (loss_of(told[5], 3), loss_of(told[4], 3), loss_of(told[4], 1)) == (2.0, None, 2.5)
