"""How long to wait for the stages, and which tensors of each stage make up one step's parameters, when stages are caught at two steps."""

from __future__ import annotations

import pytest
import torch

from peerd.daemon.export import assemble, waits_for
from peerd.stage.snapshots import Downloaded
from peerd.table.record import Lineage, Phase
from tests.strategies import member, view_of

STEP = 3


def part(stage: int, step: int, delayed: bool) -> Downloaded:
    """Parameters are the number of updates that led to them."""
    held = {"parameters": step - delayed, "previous": step - 1 - delayed, "optimizer": step} | ({"ahead": step} if delayed else {})
    return Downloaded(step, Lineage(), {f"{kind}/{stage}": torch.tensor(float(updates)) for kind, updates in held.items()}, ())


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("last", [STEP, STEP + 1])
def test_an_export_holds_the_parameters_that_all_updates_before_its_step_led_to(last: int, delayed: bool) -> None:
    parameters, optimizer = assemble([part(0, STEP, delayed), part(1, last, delayed)], STEP)
    assert {name: float(value) for name, value in parameters.items()} == {"0": STEP, "1": STEP}
    assert (optimizer is None) == (last != STEP)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ((3, 3, 3), ""),
        ((3, 4, 3), ""),
        ((3, 5, 4), "the others are steps ahead of stage 0"),
        ((3, 9, 4), "the others are steps ahead of stages 0 and 2"),
        ((3, None, 3), "nobody serves stage 1"),
        ((None, 3, None), "nobody serves stages 0 and 2"),
    ],
)
def test_an_export_waits_while_a_stage_has_nobody_or_is_behind(steps: tuple[int | None, ...], why: str) -> None:
    phases = [Phase.JOINING if step is None else Phase.ACCUMULATING for step in steps]
    view = view_of(*(member(f"p{n}", stage=n, step=step or 0, phase=phases[n]) for n, step in enumerate(steps)))
    assert waits_for(view, len(steps)) == why
